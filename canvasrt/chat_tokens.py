"""The control tokens of the model's chat format. Imports nothing."""

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TURN_END = "<turn|>"
CONTROL_TOKENS = (THOUGHT, THOUGHT_END, CALL, CALL_END, QUOTE)
# If ordinary tokens spell a control token, this character is inserted in the decoded text, before the last character of
# the spelling. It is a noncharacter of Unicode, so no text needs it.
FORGED = "\ufdd0"
