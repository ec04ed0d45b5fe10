"""Numbers and file names that several stages share; imports nothing."""

MAX_CONTEXT = 32_768  # tokens of prompt plus answer, unless the model allows fewer
MAX_BATCH = 4  # requests denoised together
PREFIX_CACHE = 512  # MiB of memory for cached prompt prefixes while serving
MAX_THREADS = 1024  # the most CPU threads that an option accepts; more would only use memory
ANSWER_TIMEOUT = 600.0  # seconds that a client waits for a whole answer
MAX_SECONDS = 10**9  # the most seconds that an option accepts; sockets and Triton fail with more
# The released model becomes five engines of six layers. Building a single engine would need three times as much memory
# as the model's weights.
LAYERS_PER_SEGMENT = 6
# If building a segment of six layers would take more than `MUCH_TO_BUILD` bytes of memory, a segment has
# `SHORT_SEGMENT` layers, because small CI machines have less memory.
SHORT_SEGMENT, MUCH_TO_BUILD = 3, 10 * 10**9

# The most tokens per row of an encoding pass, and the most tokens per image.
PREFILL_CHUNK, SOFT_TOKENS = 512, 280
# The most samples per closed question, and the most denoising steps per sample.
MAX_SAMPLES, MAX_STEPS = 64, 48
# Cached keys and values are padded to a multiple of 8 tokens, and the padding is masked. At any other length, a matrix
# product would copy the keys and values first.
OCTET = 8

# Heads larger than `MAX_FUSED_HEAD_DIM` have no fused attention kernel. So the query heads of a
# group are folded into rows, `FOLDED_HEADS` heads at a time. Folding fewer heads at a time takes less memory, but copies
# the keys more often.
MAX_FUSED_HEAD_DIM, FOLDED_HEADS = 256, 2

# The segment of a CPU bundle that computes all values that depend only on positions.
GEOMETRY = "geometry"
# An empty input `[0, n]` of body segments, which no node reads; `n` grows with the call's length. ONNX Runtime looks up
# memory plans by the XOR of all input sizes, in which sizes that occur an even number of times cancel out. `n` does not
# cancel out.
CALL_LENGTH = "call_length"
# How a GPU runs experts: in slots inside an engine, or between engines, by our own kernels over sorted rows.
SLOTTED, SORTED = "slots", "sorted"

# The files of a PEFT LoRA adapter.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# Maximum bytes of an INT8 table that a CPU dequantizes to float32 at a time.
TABLE_PIECE_BYTES = 1 << 27


def octets(tokens: int) -> int:
    """Return the number of groups of `OCTET` tokens that `tokens` tokens need; at least 1, even for 0 tokens."""
    return max(1, -(-tokens // OCTET))
