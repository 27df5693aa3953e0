"""A language model on every engine, side by side: files, perplexity, speed of prompts and of single tokens.

    python benchmarks/llm.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text TEXT [--calibration TEXT --recipe accurate]
        [--layers N] [--threads N] [--engines NAME ...] [--greedy N]

Beside quantplug's `.pte` and x86 program: ExecuTorch's own export of the same weights (8da4w, tables of 4 bits, its
cache and attention operators), torchao's int8 dynamic and int4 weight-only layers under torch.compile, and llama.cpp
(`pip install llama-cpp-python`) on the same file requantized to Q4_0. All of them read the same tokens one by one for
the perplexity. Speeds are medians of rounds in which the engines take turns; ratios are to the row above that begins
the group. `--greedy N` continues a prompt by N tokens and asks quantplug's own q/dq graph for each of them.
"""

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stored
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from vision import torchvision_models

import quantplug
from quantplug.language.artefact import LanguageArtefact
from quantplug.language.checkpoint import Checkpoint
from quantplug.language.decoder import Decoder

# Names of a Llama in transformers and in ExecuTorch, whose rotary positions can be those of transformers.
EXECUTORCH_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attention.w{part}" for part in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
STEP = 128


@dataclass(frozen=True)
class Engine:
    """What gives the logits [vocabulary] behind tokens whose first one stands at a position.

    Attributes:
        logits: of ids and a position; it keeps the cache.
        nbytes: size of the file, 0 where there is none.
        artefact: of quantplug's engines.
        reading: seconds of each round for the prompt.
        writing: seconds of each round for the tokens behind it.
    """

    logits: Callable[[list[int], int], Tensor]
    nbytes: int = 0
    artefact: LanguageArtefact | None = None
    reading: list[float] = field(default_factory=list)
    writing: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A checkpoint with its texts."""

    checkpoint: Checkpoint
    file: Path
    layers: int | None
    context: int
    threads: int
    calibration: list[Tensor] | None
    recipe: str | None
    scratch: Path


def ours(job: Job, backend: str, config: str, table: str | None = None, **lowering: Any) -> Engine:
    """Returns quantplug's artefact."""
    artefact = quantplug.quantize_language_model(
        job.checkpoint.model,
        backend,
        config,
        table=table,
        context=job.context,
        calibration=job.calibration,
        recipe=job.recipe or (),
        **lowering,
    )
    return Engine(artefact.logits, artefact.nbytes, artefact)


def executorch(job: Job) -> Engine:
    """Returns the program of ExecuTorch's own export, for the runtime of its wheel."""
    import executorch.kernels.quantized  # noqa: F401  # its look-ups of tables in 4 bits
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  # its attention
    from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType
    from executorch.runtime import Runtime

    config: Any = job.checkpoint.model.config
    weights = job.checkpoint.model.state_dict()
    held = {
        "tok_embeddings.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for number in range(config.num_hidden_layers):
        for own, theirs in EXECUTORCH_NAMES.items():
            held[f"layers.{number}.{theirs}.weight"] = weights[f"model.layers.{number}.{own}.weight"]
    params = {
        "dim": config.hidden_size,
        "hidden_dim": config.intermediate_size,
        "ffn_dim_multiplier": 1,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "n_layers": config.num_hidden_layers,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_scaled_rope": False,
        "vocab_size": config.vocab_size,
        "use_hf_rope": True,
        "attention_qkv_bias": False,
    }
    asked = LlmConfig()
    path, asked.base.model_class = job.scratch / "executorch.pte", ModelType.smollm2
    asked.base.checkpoint, asked.base.params = str(job.scratch / "weights.pth"), str(job.scratch / "params.json")
    torch.save(held, asked.base.checkpoint)
    Path(asked.base.params).write_text(json.dumps(params))
    asked.base.metadata = '{"get_bos_id": 1}'
    asked.model.use_kv_cache = asked.model.use_sdpa_with_kv_cache = asked.model.enable_dynamic_shape = True
    asked.export.max_seq_length, asked.export.max_context_length = STEP, job.context
    asked.export.output_name = str(path)
    asked.quantization.qmode, asked.quantization.group_size = "8da4w", 32
    asked.quantization.embedding_quantize = "4,32"
    asked.backend.xnnpack.enabled = asked.backend.xnnpack.extended_ops = True
    export_llama(asked)
    method = Runtime.get().load_program(path).load_method("forward")
    assert method is not None

    def logits(ids: list[int], start: int) -> Tensor:
        found: Tensor = method.execute([torch.tensor([ids]), torch.tensor([start])])[0]
        return found[0].clone()

    return Engine(logits, path.stat().st_size)


def compiled(job: Job, configs: Iterable[Any]) -> Engine:
    """Returns the model with torchao's layers over the same cache, compiled for prompts and for single tokens."""
    from torchao.quantization import quantize_

    model = copy.deepcopy(job.checkpoint.model)
    if model.config.tie_word_embeddings:  # a head of its own: torchao would round the table too
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for config in configs:
        quantize_(model, config)
    run = torch.compile(Decoder(model.eval(), job.context), dynamic=True)

    def logits(ids: list[int], start: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = run(torch.tensor([ids]), torch.tensor([start]))[0]
        return found.float()

    return Engine(logits)


def torchao_int8(job: Job) -> Engine:
    """Returns torchao's int8 weights with dynamic activations."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return compiled(job, [Int8DynamicActivationInt8WeightConfig()])


def torchao_int4(job: Job) -> Engine:
    """Returns torchao's weights in 4 bits for its packed kernel on CPUs."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return compiled(job, [PrototypeInt4WeightOnlyConfig(group_size=32)])


def float_compiled(job: Job) -> Engine:
    """Returns the float model, compiled."""
    return compiled(job, [])


def llama_cpp(job: Job) -> Engine:
    """Returns llama.cpp on the file in Q4_0."""
    import llama_cpp
    from numpy.ctypeslib import as_array

    if job.layers is not None or job.file.suffix != ".gguf":
        raise ValueError("llama.cpp takes a whole GGUF file")
    path, options = job.scratch / "q4_0.gguf", llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True, job.threads
    if llama_cpp.llama_model_quantize(str(job.file).encode(), str(path).encode(), options):
        raise ValueError("llama.cpp could not requantize the file")
    count = {"n_threads": job.threads, "n_threads_batch": job.threads}
    model = llama_cpp.Llama(str(path), n_ctx=job.context, n_batch=STEP, verbose=False, **count)

    def logits(ids: list[int], start: int) -> Tensor:
        model.n_tokens = start
        model.eval(ids)
        last = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return torch.from_numpy(as_array(last, shape=(model.n_vocab(),)).copy())

    return Engine(logits, path.stat().st_size)


# Each group is compared with its first row.
GROUPS: tuple[dict[str, Callable[[Job], Engine]], ...] = (
    {
        "quantplug, .pte 8da4w": lambda job: ours(job, "xnnpack", "8da4w", threads=job.threads),
        "executorch, .pte 8da4w": executorch,
        "llama.cpp, Q4_0": llama_cpp,
    },
    {
        "quantplug, x86 int8_dynamic": lambda job: ours(job, "x86", "int8_dynamic", "int8_weight_only"),
        "torchao, int8 dynamic, compiled": torchao_int8,
        "float, compiled": float_compiled,
    },
    {
        "quantplug, x86 int4_weight_only": lambda job: ours(job, "x86", "int4_weight_only", "int8_weight_only"),
        "torchao, int4 weight-only, compiled": torchao_int4,
    },
)


def perplexity(engine: Engine, texts: Sequence[Tensor]) -> float:
    """Returns the perplexity of texts that are read one token at a time."""
    total, count = 0.0, 0
    for ids in texts:
        tokens = ids[0].tolist()
        logits = torch.stack([engine.logits([token], start) for start, token in enumerate(tokens[:-1])])
        total += float(cross_entropy(logits.float(), ids[0, 1:], reduction="sum"))
        count += len(tokens) - 1
    return float(torch.tensor(total / count).exp())


def take_turns(engines: Sequence[Engine], rounds: int, prompt: int, tokens: int) -> None:
    """Times a prompt and single tokens behind it on each engine in turn; the first round warms up."""
    for number in range(rounds + 1):
        for engine in engines:
            began = time.perf_counter()
            engine.logits([token % 1000 + 1 for token in range(prompt)], 0)
            read = time.perf_counter()
            for position in range(prompt, prompt + tokens):
                engine.logits([position % 1000 + 1], position)
            if number:
                engine.reading.append(read - began)
                engine.writing.append(time.perf_counter() - read)


@torch.no_grad()
def agreement(artefact: LanguageArtefact, prompt: list[int], tokens: int) -> str:
    """Continues a prompt, and holds each choice against the q/dq graph's for the same text.

    A difference is a tie where the graph's own logits of the two choices are nearer than the program's noise at them.
    """
    assert artefact.made is not None
    graph, start, fed, others = artefact.made.reference, 0, prompt, []
    for _ in range(tokens):
        found, expected = artefact.logits(fed, start), graph(torch.tensor([fed]), torch.tensor([start]))[0]
        chosen, wanted = int(found.argmax()), int(expected.argmax())
        if chosen != wanted:
            gap, noise = float(expected[wanted] - expected[chosen]), float((found - expected).abs().max())
            others.append((gap, noise))
        start, fed = start + len(fed), [chosen]
    ties = sum(gap <= 2 * noise for gap, noise in others)
    widest = max((gap for gap, _ in others), default=0.0)
    equal = tokens - len(others)
    return f"{equal} of {tokens} tokens equal, {len(others)} not, {ties} of these ties (widest {widest:.3f})"


def built(job: Job, wanted: Sequence[str], console: Console) -> Iterator[tuple[int, str, Engine]]:
    """Yields the engines that can be made, with their group."""
    for group, makers in enumerate(GROUPS):
        for name, make in makers.items():
            if not any(part in name for part in wanted):
                continue
            began = time.perf_counter()
            try:
                engine = make(job)
                engine.logits([1, 2, 3], 0)
                engine.logits([4], 3)
            except Exception as error:  # a peer may fail in any way, which is a result
                console.print(f"{name} fails: {type(error).__name__}: {str(error)[:300]}", markup=False)
                continue
            size = f"{engine.nbytes / 1e6:.1f} MB" if engine.nbytes else "no file"
            console.print(f"{name}: {time.perf_counter() - began:.0f} s to the first tokens, {size}", markup=False)
            yield group, name, engine


def job_of(arguments: argparse.Namespace, scratch: Path) -> tuple[Job, list[Tensor]]:
    """Returns what is measured, and the texts that are scored."""
    checkpoint = quantplug.load_checkpoint(arguments.model)
    if arguments.layers:
        checkpoint.model.model.layers = checkpoint.model.model.layers[: arguments.layers]
        checkpoint.model.config.num_hidden_layers = arguments.layers

    def pieces(path: Path, count: int | None) -> list[Tensor]:
        ids = checkpoint.tokenizer(path.read_text("utf-8"), return_tensors="pt", verbose=False).input_ids
        return [ids[:, i : i + STEP] for i in range(0, ids.shape[1] - STEP + 1, STEP)][:count]

    calibration = pieces(arguments.calibration, None) if arguments.calibration else None
    own = (arguments.model, arguments.layers, arguments.context, arguments.threads, calibration, arguments.recipe)
    return Job(checkpoint, *own, scratch), pieces(arguments.text, arguments.score)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Llama: a GGUF file or a folder of transformers")
    parser.add_argument("--text", type=Path, required=True, help="what is scored")
    parser.add_argument("--calibration", type=Path, help="what recipes look at")
    parser.add_argument("--recipe", help="such as accurate")
    parser.add_argument("--layers", type=int, help="the first layers only")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="*", default=[""], help="parts of names; all by default")
    parser.add_argument("--score", type=int, default=4, help="pieces of 128 tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--greedy", type=int, default=0)
    stored.add_option(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    torchvision_models()  # transformers imports torchvision, which needs its operators
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as scratch:
        job, texts = job_of(arguments, Path(scratch))
        with torch.no_grad():
            losses = [cross_entropy(job.checkpoint.model(ids).logits[0, :-1], ids[0, 1:]) for ids in texts]
        exact = float(torch.stack(losses).mean().exp())
        engines = list(built(job, arguments.engines, console))
        take_turns([engine for _, _, engine in engines], arguments.rounds, arguments.prompt, arguments.tokens)
        columns = ("MB", "of float", "perplexity", "prefill", "to the first", "decode", "decode to the first")
        table = Table("program", *columns)
        table.title = f"perplexity of float {exact:.2f}; tokens/s of {arguments.threads} thread(s)"
        first: dict[int, Engine] = {}
        for group, name, engine in engines:
            head = first.setdefault(group, engine)
            read, write = statistics.median(engine.reading), statistics.median(engine.writing)
            table.add_row(
                name,
                f"{engine.nbytes / 1e6:.1f}",
                f"{engine.nbytes / job.checkpoint.nbytes:.3f}",
                f"{perplexity(engine, texts):.2f}",
                f"{arguments.prompt / read:.0f}",
                f"{statistics.median(head.reading) / read:.2f}",
                f"{arguments.tokens / write:.1f}",
                f"{statistics.median(head.writing) / write:.2f}",
            )
        console.print(table)
        stored.store(arguments.store, stored.rows_of(table), ("program",))
        for _, name, engine in engines:
            if arguments.greedy and engine.artefact is not None:
                said = agreement(engine.artefact, texts[0][0, :32].tolist(), arguments.greedy)
                console.print(f"{name}: {said}", markup=False)


if __name__ == "__main__":
    main()
