"""`canvasrt doctor`: shows what works on this machine."""

from typing import Any

from canvasrt.cli import options
from canvasrt.console import emit

_MARKS = {
    "ok": "[green]ok  [/green]",
    "gap": "[bold red]gap [/bold red]",
    "info": "[dim]info[/dim]",
}


def doctor(as_json: options.AsJson = False) -> None:
    """Show what is installed and works on this machine, and how to fix what does not."""
    from rich.markup import escape

    from canvasrt.cli.doctor_checks import doctor_report

    data = doctor_report()

    def render(console: Any) -> None:
        for check in data["checks"]:
            mark = _MARKS[check["state"]]
            console.print(f"{mark} {escape(check['name'])}: {escape(check['found'])}")
            if check["fix"]:
                console.print(f"     → {escape(check['fix'])}")
        gaps = data["gaps"]
        console.print(
            "\nnothing is missing" if not gaps else f"\n{gaps} missing or broken: see → above"
        )

    emit(data, as_json, render)
