"""How the model's chat format spells its control tokens; imports nothing."""

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TURN_END = "<turn|>"
CONTROL_TOKENS = (THOUGHT, THOUGHT_END, CALL, CALL_END, QUOTE)
# In decoded text, before the last character of such a spelling by ordinary tokens. No text needs this noncharacter.
FORGED = "\ufdd0"
