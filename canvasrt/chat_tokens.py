"""The control tokens of the model's chat format. Imports nothing."""

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TURN_END = "<turn|>"
CONTROL_TOKENS = (THOUGHT, THOUGHT_END, CALL, CALL_END, QUOTE)
# If ordinary tokens decode to the text of a control token, this character is inserted before that text's last
# character. It is a Unicode noncharacter, so ordinary text does not contain it.
FORGED = "\ufdd0"
