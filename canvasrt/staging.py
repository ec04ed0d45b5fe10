"""Writes a folder next to its destination and renames it, so that readers never see an incomplete folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from canvasrt.errors import CanvasError

# Errors of `flock` on filesystems without locks, such as Lustre mounted without `flock`.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_TEXTS = ("no space left on device", "file too large", "disk quota exceeded")
_ALMOST_NOTHING = 1 << 16
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def staging(out: Path | str) -> Iterator[Path]:
    """Yield a folder that is renamed to `out` when the `with` block ends without an exception.

    After an exception, an interrupt or SIGTERM, the folder is removed. Folders left behind by killed processes are
    removed, too.
    Raises CanvasError if `out` is not empty, or if the disk is full.
    """
    out = Path(out).expanduser().resolve()
    check_output(out)
    with scratch(out) as tmp:
        yield tmp
        _move_into_place(tmp, out)


@contextlib.contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out`, on the same disk, and remove it when the block ends."""
    with signals_raise():
        made = _make_parents(out.parent)
        remove_stale(out.parent, out.name)
        tmp = out.parent / f".{out.name}.partial-{os.getpid()}"
        _make(tmp, exist_ok=False)
        try:
            with _locked(tmp):
                yield tmp
        except Exception as error:
            if is_disk_full(error, tmp):
                raise disk_full_error(out) from error
            raise
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
            for folder in reversed(made):
                # A parent that already contains a result of this or another process stays, because it is not empty.
                with contextlib.suppress(OSError):
                    folder.rmdir()


def check_output(out: Path | str) -> None:
    """Raise CanvasError when `out` is not empty, or cannot be created or replaced."""
    out = Path(out).expanduser().resolve()
    parent = next(folder for folder in out.parents or [out] if folder.exists())
    if out.is_dir():
        if next(out.iterdir(), None) is not None:
            raise CanvasError(f"{out} is not empty", "name another folder, or empty this one first")
        if out.is_mount():  # it cannot be replaced by the finished folder
            raise CanvasError(f"{out} is a mount point", f"name a folder in it: {out / 'new'}")
    elif out.exists():
        raise CanvasError(f"{out} is a file", "name a folder")
    elif not parent.is_dir():
        raise CanvasError(f"{parent} is a file, so {out} cannot be created", "name another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CanvasError(f"{parent} is not writable", "name a folder elsewhere")


def is_disk_full(error: BaseException | None, folder: Path | None) -> bool:
    """Return whether an exception or one of its causes means that the disk or a quota is full.

    Some writers (numpy, Rust extensions) report a full disk without an errno. Therefore, messages are checked, too. If
    `folder` is given, the free space on its disk is also checked.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(text in str(error).lower() for text in _FULL_TEXTS):
            return True
        if folder is not None and isinstance(error, OSError) and error.errno is None:
            with contextlib.suppress(OSError):
                return shutil.disk_usage(folder).free < _ALMOST_NOTHING
        error = error.__cause__ or error.__context__
    return False


def disk_full_error(out: Path) -> CanvasError:
    """Return the error for a full disk."""
    free = ""
    with contextlib.suppress(OSError):
        folder = next(parent for parent in (out, *out.parents) if parent.exists())
        free = f" ({shutil.disk_usage(folder).free / 1e9:.1f} GB free now)"
    return CanvasError(
        f"no space left while writing {out}; its unfinished files were removed",
        f"free space on that disk{free}, raise the limit on file sizes, or write elsewhere; finished work in the"
        " cache is reused",
    )


def link_or_copy(source: Path, destination: Path) -> None:
    """Hard-link a file, so that it takes no more space. Copy it if the destination is on another disk."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), destination)
    except OSError:
        shutil.copyfile(source, destination)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network filesystems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _move_into_place(tmp: Path, out: Path) -> None:
    # Otherwise the rename could reach the disk before the files' bytes, and a power cut would leave a damaged `out`.
    for folder, _, files in os.walk(tmp):
        for name in files:
            if not (Path(folder) / name).is_symlink():
                sync(Path(folder) / name)
        sync(Path(folder))
    try:
        os.rename(tmp, out)
        sync(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CanvasError(
                f"another process created {out} in the meantime", "name another folder"
            ) from error
        raise


def _make_parents(folder: Path) -> list[Path]:
    """Create a folder and its missing parents; return the new ones, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    _make(folder, exist_ok=True)
    return missing


def _make(folder: Path, exist_ok: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full_error(folder) from error
        raise CanvasError(
            f"{folder} cannot be created: {error.strerror}", "name a folder elsewhere"
        ) from error


@contextlib.contextmanager
def _locked(tmp: Path) -> Iterator[None]:
    """Lock a folder while the block runs, to show other processes that the folder's writer is alive."""
    handle = os.open(tmp, os.O_RDONLY)
    try:
        # On a filesystem without locks, only the process id in the folder's name shows that the writer is alive.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def remove_stale(folder: Path, name: str = "") -> None:
    """Remove partial folders in `folder` whose writer has ended. If `name` is given, remove only those for `name`."""
    for found in folder.glob(f".{glob.escape(name) or '*'}.partial-*"):
        pid = found.name.rpartition("-")[2]
        if pid.isdigit() and not _is_running(int(pid)) and not is_locked(found):
            shutil.rmtree(found, ignore_errors=True)


def _is_running(pid: int) -> bool:
    if pid == os.getpid():
        return False  # a dead process's id may be in use again, as is usual in containers
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock of a folder or file.

    A process in another container may share the disk but not the process table.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """While the block runs, let signals without a handler raise an exception instead of killing the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, raise_exit)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def system_error(error: Exception) -> CanvasError | None:
    """Return the CanvasError for an error of the system, such as a full disk; None for other errors, which are bugs."""
    if is_disk_full(error, None):
        return CanvasError("no space left on the disk", "free some space, or write to another disk")
    if isinstance(error, FileNotFoundError) and error.filename:
        path, folder = Path(error.filename), Path(error.filename).parent
        return CanvasError(
            f"{path if folder.is_dir() else folder} does not exist", "check the path"
        )
    # Without a usable temporary folder, `tempfile` raises a FileNotFoundError that names no file.
    refused = isinstance(error, FileNotFoundError | PermissionError)
    if isinstance(error, OSError) and error.strerror and (error.filename or refused):
        place = f"{error.filename}: " if error.filename else ""
        return CanvasError(f"{place}{error.strerror}", "check the path and its permissions")
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # from `expanduser`
        return CanvasError(
            "a path begins with ~, but that user has no home folder",
            "write the whole path, or ./~NAME for a name that begins with ~",
        )
    if isinstance(error, MemoryError):
        return CanvasError(
            "out of memory", "close other programs, or use a machine with more memory"
        )
    return None


def raise_exit(number: int, frame: FrameType | None) -> None:
    """Handle a signal: unwind the stack and exit with the shell's code for that signal."""
    while frame is not None:
        if frame.f_code is _unraisable.__code__:  # where Python ignores an exit, too
            _send_again(number)
            return
        frame = frame.f_back
    sys.unraisablehook = partial(_unraisable, number, sys.unraisablehook)
    raise SystemExit(128 + number)


def _unraisable(number: int, shown: Any, ignored: Any) -> None:
    """Send a signal again if Python has ignored the exit that the signal raised. Python ignores exceptions in
    destructors and in weak references' callbacks."""
    if ignored.exc_type is SystemExit:
        _send_again(number)
    else:
        shown(ignored)


def _send_again(number: int) -> None:
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
