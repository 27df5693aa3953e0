"""Language models over a cache: the logits of the whole sequence at once, on both targets, and tokens from them."""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from language_models import VOCABULARY, causal, texts, tokenizer, write_folder

import quantplug
from quantplug.core.errors import ConfigError
from quantplug.core.specs.levels import sqnr
from quantplug.language.decoder import objection
from quantplug.language.measure import perplexity, speed
from quantplug.lowering.executorch_names import attention_operator
from quantplug.lowering.xnnpack.runtime import quiet

CONTEXT = 128
# Decibels of float, of the q/dq graph, and of the program itself given the whole prefix at once. Random weights have no
# outliers and no redundancy: 4 bits of them are 18 decibels. The kernel of groups has scales in bfloat16, and an
# activation that lies between two steps goes either way.
CONFIGS = {
    ("xnnpack", "8da4w"): (12, 32, 30),
    ("xnnpack", "int8_dynamic"): (34, 60, 90),
    ("xnnpack", "float32"): (100, 100, 100),
    ("x86", "int8_dynamic"): (34, 38, 34),
    ("x86", "float32"): (100, 100, 100),
}
# A cache in int8 loses so much beside layers in float; a ratio that lies between two integers goes either way.
INTEGER_CACHE = (42, 60, 60)
_MADE: dict[tuple[Any, ...], Any] = {}


def made(backend="xnnpack", config="8da4w", family="Llama", context=CONTEXT, layers=2, cache="float32"):
    """Returns a float model and its artefact, which tests share."""
    key = backend, config, family, context, layers, cache
    if key not in _MADE:
        model = causal(family, num_hidden_layers=layers)
        options = {"context": context, "cache": cache, "progress": False}
        _MADE[key] = model, quantplug.quantize_language_model(model, backend, config, **options)
    return _MADE[key]


@pytest.fixture(scope="module")
def xnnpack():
    return made(layers=1)  # ExecuTorch takes eight seconds for a layer


@pytest.fixture(scope="module")
def x86():
    return made("x86", "int8_dynamic")


def agrees_with_the_whole(model, artefact, bounds, parts=(10, 6), steps=100):
    """Two parts of a prompt, then one token after the other."""
    ids = texts(sum(parts) + steps)[0]
    reference = copy.deepcopy(artefact.made.reference)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0]
        start = 0
        for length in (*parts, *[1] * steps):
            tokens, position = ids[:, start : start + length], torch.tensor([start])
            found = artefact.program(tokens, position)[0]
            start += length
            assert sqnr(found, whole[start - 1]) > bounds[0], start
            assert sqnr(found, reference(tokens, position)[0]) > bounds[1], start
        # The rows of the cache behind the prefix are full of another text by now, as far as this one sees.
        last = min(start, artefact.facts.step)
        once = artefact.program(ids[:, :last], torch.tensor([0]))[0]
        assert sqnr(once, whole[last - 1]) > bounds[0]
        if last == start:
            assert sqnr(once, found) > bounds[2]
    return found


def _check(backend, config, family="Llama", context=CONTEXT, layers=2, cache="float32", **options):
    model, artefact = made(backend, config, family, context, layers, cache)
    bounds = CONFIGS[backend, config] if cache == "float32" else INTEGER_CACHE
    first = agrees_with_the_whole(model, artefact, bounds, **options)
    artefact.reset()
    assert torch.equal(agrees_with_the_whole(model, artefact, bounds, **options), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "config", "layers"), [("xnnpack", "8da4w", 1), ("x86", "int8_dynamic", 2), ("x86", "float32", 2)]
)
def test_a_cache_gives_the_logits_of_the_whole_sequence(backend, config, layers):
    _check(backend, config, layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "config"), [("xnnpack", "8da4w"), ("x86", "int8_dynamic")])
def test_a_cache_gives_the_logits_of_the_whole_sequence_for_500_steps(backend, config):
    _check(backend, config, context=576, parts=(40, 24), steps=500)


@pytest.mark.parametrize(
    ("backend", "steps"),
    [("x86", 60), *(pytest.param(name, 500, marks=pytest.mark.slow) for name in ("xnnpack", "x86"))],
)
def test_a_cache_in_integers_gives_the_logits_of_the_whole_sequence(backend, steps):
    asked = {"cache": "int8", "context": steps + 76, "layers": 1}
    _check(backend, "float32", parts=(40, 24), steps=steps, **asked)
    buffers = made(backend, "float32", **asked)[1].made.reference.buffers()
    kept = [buffer.dtype for buffer in buffers if buffer.dim() == 4]
    assert kept.count(torch.int8) == kept.count(torch.float32) == 2  # integers and scales of keys and values


@pytest.mark.few(1)
@pytest.mark.slow
def test_a_cache_in_integers_costs_no_delegate():
    """Scales of rows are found outside, and integers are read inside, between the delegates of a cache in float."""
    integers = made(layers=1, cache="int8")[1]
    assert placements_of_attention(integers) == ["float"]  # the model's own, which is a part of a delegate
    counts = integers.made.program.counts
    assert counts.delegates == 3
    assert counts.converts == made(layers=1)[1].made.program.counts.converts + 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Gemma"])
def test_attention_of_executorch(family):
    """Heads that share keys in pairs, none that do, and all of them; rotary positions of a part."""
    operator = made("xnnpack", "float32", family, layers=1)[1]
    assert operator.facts.attends_to_rows
    assert b"llama::custom_sdpa" in operator.made.program.buffer
    assert "scaled_dot_product_attention" not in {op.node for op in operator.made.program.ops}
    _check("xnnpack", "float32", family, layers=1, parts=(20, 10), steps=20)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["Llama", "GPTNeoX", "Gemma"])
def test_attention_of_x86_reads_the_rows_that_are_filled(family):
    """Rows behind the last position are not even multiplied by 0: they may be no numbers."""
    artefact = made("x86", "float32", family, layers=1)[1]
    _check("x86", "float32", family, layers=1, parts=(20, 10), steps=20)
    artefact.reset()
    expected = artefact.logits([3, 1, 4, 1, 5], 0)
    for name, rows in artefact.program.module.named_buffers():
        if name.startswith(("keys", "values")):
            rows[:, 5:] = float("nan")
    assert torch.equal(artefact.logits([3, 1, 4, 1, 5], 0), expected)
    assert torch.equal(artefact.logits(torch.tensor([[3, 1, 4, 1, 5]]), 0), expected)
    with pytest.raises(ConfigError, match=r"The prompt has \[3, 1\], which is no token"):
        artefact.logits(torch.tensor([[3, 1], [4, 1]]), 0)
    artefact.reset()


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_recipes_train_through_attention_to_a_cache(backend):
    """The scales of a decoder whose weights have 4 bits, with the attention that it has by default."""
    config = {"xnnpack": "8da4w", "x86": "int4_weight_only"}[backend]
    given = [torch.randint(0, VOCABULARY, (1, 40)) for _ in range(3)]
    recipe, model = [quantplug.TrainScales()], causal("Llama", num_hidden_layers=1)
    artefact = quantplug.quantize_language_model(
        model, backend, config, context=64, calibration=given, recipe=recipe, progress=False
    )
    assert artefact.made is not None
    assert artefact.facts.attends_to_rows
    assert "scale" in str(artefact.made.applied[0])


def test_attention_of_executorch_is_quiet(capfd):
    """Its operator for PyTorch tells of each call that it has no allocator, where programs are compared."""
    rows = torch.randn(1, 4, 2, 8)
    with quiet():
        attention_operator()(rows, rows, rows, 0, None, 0.0, True, 0.5)
    assert "executorch" not in capfd.readouterr().err


def test_attention_that_is_another_one_stays():
    """A window within the context, a limit on products (which numbers would hardly show), and a model's own code."""
    reasons = {family: objection(causal(family), CONTEXT) for family in ("Mistral", "Gemma2", "Bloom")}
    assert all(reasons.values()), reasons
    assert objection(causal("Mistral"), 16) is None
    assert objection(causal("Llama"), CONTEXT) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "flash"}, "choose one of"),
        ({"attention": "executorch", "cache": "int8"}, "leave one of them out"),
        ({"attention": "executorch", "backend": "x86"}, "leave it out"),
        ({"attention": "filled"}, "leave it out"),
    ],
)
def test_attention_that_is_not_there(options, said):
    with pytest.raises(quantplug.ConfigError, match=said):
        quantplug.quantize_language_model(causal("Llama"), **options)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime", "tensorrt", "arm", "cortex_m"])
def test_backends_without_programs_of_language_models(backend):
    with pytest.raises(quantplug.ConfigError, match=rf"'{backend}' writes no language models; choose one of \['x86'"):
        quantplug.quantize_language_model(causal("Llama"), backend)


def test_attention_that_a_model_cannot_have_says_why():
    with pytest.raises(quantplug.ModelError, match="do not look back at all tokens"):
        quantplug.quantize_language_model(causal("Mistral"), context=CONTEXT, attention="executorch")


# Falcon has biases for positions, BioGPT asks how many rows are filled, DeepSeek keeps latents; three have experts.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family", ["BioGpt", "Falcon", "Qwen2", "GPTNeoX", "Gemma", "Mistral", "DeepseekV3", "Mixtral", "GptOss"]
)
def test_other_families(family):
    _check("x86", "float32", family, parts=(20, 10), steps=20)


def test_a_model_that_counts_rows_of_its_cache_that_are_not_filled_is_refused():
    with pytest.raises(quantplug.ModelError, match=r"GPTNeo.* does not decode with a cache of fixed size \(its logits"):
        quantplug.quantize_language_model(causal("GPTNeo"), "x86", context=CONTEXT)


def test_a_model_that_export_does_not_follow_is_refused_in_a_sentence(capfd):
    with pytest.raises(quantplug.ModelError, match=r"torch.export fails on MptForCausalLM over a cache \("):
        quantplug.quantize_language_model(causal("Mpt"), "x86", context=CONTEXT)
    assert "def forward" not in capfd.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_each_expert_is_layers_of_integers(backend, family):
    """What chooses them jumps: a token that another expert computes is another one, but most are the same."""
    artefact = made(backend, "int8_dynamic", family, layers=1)[1]
    layers = [op.placement for op in artefact.made.program.ops if "linear" in op.target]
    of_expert = 3 if (backend, family) == ("xnnpack", "Mixtral") else 2  # a gate and what it gates are apart there
    assert layers == ["int8"] * (4 + 1 + of_expert * 4 + 1)  # attention, router, experts, head
    ids, reference = texts(60)[0], copy.deepcopy(artefact.made.reference)
    artefact.reset()
    kept = []
    for position in range(ids.shape[1]):
        given = ids[:, position : position + 1], torch.tensor([position])
        kept.append(sqnr(artefact.program(*given), reference(*given)))
    assert sorted(kept)[6] > 40


def test_a_recipe_learns_of_the_head_from_every_token_of_a_text():
    """And the program computes it for the last token alone."""
    model, given, ids = causal(), texts(60, 8), texts(60, 11)[10]

    def kept(recipe):
        options = {"context": 64, "table": "float32", "calibration": given, "recipe": recipe, "progress": False}
        artefact = quantplug.quantize_language_model(model, "xnnpack", "8da4w", **options)
        slices = [node for node in artefact.made.reference.graph.nodes if node.target is torch.ops.aten.slice.Tensor]
        assert any(node.args[1:3] == (1, -1) for node in slices)
        found = [artefact.logits([int(token)], position) for position, token in enumerate(ids[0])]
        with torch.no_grad():
            return sqnr(torch.stack(found), model(ids).logits[0])

    assert kept([quantplug.GPTQ()]) > kept(()) + 1


def test_the_accurate_recipe_turns_a_table_of_few_bits():
    """Two channels of the stream are larger than the others, as in trained models, and the head is the table."""
    model, given, ids = causal("Llama", tie_word_embeddings=True), texts(60, 8), texts(60, 11)[10]
    with torch.no_grad():
        model.get_input_embeddings().weight[:, [3, 11]] *= 5
        for name, value in model.named_parameters():
            if "norm" in name:
                value[[3, 11]] /= 5

    def kept(recipe):
        options = {"context": 64, "calibration": given, "recipe": recipe, "progress": False}
        artefact = quantplug.quantize_language_model(model, "xnnpack", "8da4w", **options)
        found = [artefact.logits([int(token)], position) for position, token in enumerate(ids[0])]
        with torch.no_grad():
            return sqnr(torch.stack(found), model(ids).logits[0]), artefact

    turned, artefact = kept("accurate")
    assert "rotated channels" in str(artefact.made.applied[0])
    assert turned > kept([quantplug.GPTQ()])[0] + 2


@dataclass
class Watching:
    """An algorithm that looks at what a decoder returns."""

    stage: str
    seen: list[Any] = field(default_factory=list)

    def apply(self, model, loader, *, inputs=None):
        with torch.no_grad():
            self.seen += [copy.deepcopy(model)(*batch) for batch in loader]


@pytest.mark.parametrize(("backend", "config"), [("xnnpack", "8da4w"), ("xnnpack", "int8"), ("x86", "int8_dynamic")])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_recipe_sees_the_logits_behind_each_token_and_the_program_gives_the_last(backend, config, family):
    model, given = causal(family, num_hidden_layers=1), texts(20, 3)
    watching = [Watching("float"), Watching("calibrated")]
    artefact = quantplug.quantize_language_model(
        model, backend, config, context=64, calibration=given, recipe=watching, progress=False
    )
    for each in watching:
        for ids, found in zip(given, each.seen, strict=True):
            with torch.no_grad():
                assert found.shape == (1, 20, VOCABULARY)
                assert sqnr(found, model(ids).logits) > 100
    reference = copy.deepcopy(artefact.made.reference)
    batch = given[0], torch.zeros(1, dtype=torch.int64)
    assert reference(*batch).shape == artefact.program(*batch).shape == (1, VOCABULARY)
    assert sqnr(artefact.program(*batch), model(given[0]).logits[:, -1]) > 8


@pytest.mark.parametrize("backend", ["xnnpack", "x86"])
def test_experts_of_a_model_without_a_cache_are_layers_of_integers_too(backend):
    model = causal("Mixtral", num_hidden_layers=1, use_cache=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"input_ids": texts(20)[0]}
    artefact = quantplug.quantize(model, None, backend, config="int8_dynamic", example_kwargs=given, progress=False)
    layers = [op.placement for op in artefact.program.ops if "linear" in op.target]
    assert layers == ["int8"] * (4 + 1 + 2 * 4 + 1)  # attention, router, experts, head
    for ids in (given["input_ids"], texts(20, 2)[1]):
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0]
        found = artefact(input_ids=ids).logits[0]
        kept = sorted(sqnr(*pair) for pair in zip(found, expected, strict=True))
        assert kept[3] > 30  # a token that other experts compute is another one
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_an_earlier_text_left_is_no_part_of_a_range():
    """Latents of DeepSeek go through a layer behind the cache, whose activations have one scale on x86."""
    _, artefact = made("x86", "int8_dynamic", "DeepseekV3")
    artefact.reset()
    first = artefact.logits(texts(9)[0][0].tolist(), 0)
    artefact.logits([7] * 60, 0)
    assert torch.equal(artefact.logits(texts(9)[0][0].tolist(), 0), first)


@pytest.mark.slow
def test_complex_positions_on_xnnpack():
    """DeepSeek V2 turns its queries and keys by complex numbers that it computes from the positions."""
    _check("xnnpack", "float32", "DeepseekV2", layers=1, parts=(20, 10), steps=20)


@pytest.mark.slow
def test_a_window_on_xnnpack():
    """Its mask is not the operator's, so that the model's own attention reads all rows."""
    _check("xnnpack", "float32", "Mistral", parts=(20, 10), steps=20)
    assert placements_of_attention(made("xnnpack", "float32", "Mistral")[1]) == ["float", "float"]


def greedy(model, ids, count):
    """Tokens of the whole sequence at once, without any cache."""
    tokens = list(ids)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(ids) :]


def test_float_generates_what_the_model_does():
    model, artefact = made("x86", "float32")
    ids = texts(9)[0]
    assert list(artefact.generate(ids, 30, stop=())) == greedy(model, ids[0].tolist(), 30)


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["xnnpack", "x86"])
def test_a_second_call_generates_the_same(target, request, tmp_path):
    _, artefact = request.getfixturevalue(target)
    first = list(artefact.generate(texts(9)[0], 12, stop=()))
    list(artefact.generate(texts(50)[0][:, 20:], 20, stop=()))
    assert list(artefact.generate(texts(9)[0][0].tolist(), 12, stop=())) == first
    artefact.reset()
    assert list(artefact.generate(texts(9)[0], 12, stop=())) == first
    path = artefact.save(tmp_path / ("model.pte" if target == "xnnpack" else "model.pt2"))
    assert path.stat().st_size == artefact.nbytes
    loaded = quantplug.load_language_model(path)
    assert loaded.facts == artefact.facts
    for _ in range(2):
        assert list(loaded.generate(texts(9)[0], 12, stop=())) == first
        loaded.reset()
    if target == "xnnpack":
        assert loaded.save(tmp_path / "again.pte").read_bytes() == path.read_bytes()


def test_generation_ends_where_it_should(x86):
    _, artefact = x86
    free = list(artefact.generate(texts(9)[0], 30, stop=()))
    assert list(artefact.generate(texts(9)[0], 30, stop={free[4]})) == free[: free.index(free[4])]
    full = list(artefact.generate(texts(9)[0], stop=()))
    assert len(full) == CONTEXT - 9 + 1
    assert full[:30] == free
    assert len(list(artefact.generate(texts(CONTEXT)[0], stop=()))) == 1


def test_drawn_tokens_depend_on_the_seed(x86):
    _, artefact = x86

    def drawn(seed, temperature=3.0):
        return list(artefact.generate(texts(9)[0], 20, temperature=temperature, seed=seed, stop=()))

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, 1e-6) == list(artefact.generate(texts(9)[0], 20, stop=()))


@pytest.mark.parametrize(
    ("ids", "options", "said"),
    [
        ([], {}, "The prompt is empty"),
        ([3, math.nan], {}, "The prompt has 'nan'|The prompt has nan"),
        (torch.tensor([0.5]), {}, "The prompt has .*0.5"),
        ([VOCABULARY], {}, "200, which is no token of 0..199"),
        ([-1], {}, "-1, which is no token"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, "which is no token"),
        ([3] * (CONTEXT + 1), {}, "The prompt has 129 tokens, and the cache holds 128; shorten it"),
        ([3] * 100, {"max_new_tokens": 30}, "has room for 1 to 29"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([3], {"temperature": -1}, "temperature is -1"),
        ([3], {"temperature": math.nan}, "temperature is nan"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_token(ids, options, said, x86):
    with pytest.raises(quantplug.ConfigError, match=said):
        x86[1].generate(ids, **options)


def test_a_text_that_another_one_interrupted_does_not_go_on(x86):
    _, artefact = x86
    first = artefact.generate([3, 4], 10, stop=())
    next(first)
    next(artefact.generate([5], 10, stop=()))
    with pytest.raises(quantplug.LoweringError, match="Another text was begun"):
        next(first)


def test_what_is_no_language_model(tmp_path):
    with pytest.raises(quantplug.ModelError, match="positions; give 2 to 640"):
        quantplug.quantize_language_model(causal(), context=641)
    with pytest.raises(quantplug.ConfigError, match="step is 9 and the context 8"):
        quantplug.quantize_language_model(causal(), context=8, step=9)
    with pytest.raises(quantplug.ConfigError, match="There is no cache in 'int4'; choose one of"):
        quantplug.quantize_language_model(causal(), context=8, cache="int4")
    with pytest.raises(quantplug.ConfigError, match="has no config '4da8w'"):
        quantplug.quantize_language_model(causal(), config="4da8w")
    with pytest.raises(quantplug.CalibrationError, match=r"Text 0 is torch\.float32"):
        quantplug.quantize_language_model(causal(), calibration=[torch.zeros(1, 4)])
    with pytest.raises(quantplug.CalibrationError, match=r"Text 1 has an id outside of 0\.\.199"):
        quantplug.quantize_language_model(causal(), calibration=[*texts(4), torch.tensor([[200]])])
    with pytest.raises(quantplug.ArtefactError, match="There is no file"):
        quantplug.load_language_model(tmp_path / "none.pte")
    (tmp_path / "text.pte").write_text("no program")
    with pytest.raises(quantplug.ArtefactError, match="no program"):
        quantplug.load_language_model(tmp_path / "text.pte")


@pytest.mark.slow
def test_another_program_is_no_language_model(tmp_path):
    other = quantplug.quantize(
        torch.nn.Linear(8, 8).eval(), (torch.ones(1, 8),), "xnnpack", config="int8_dynamic", progress=False
    )
    with pytest.raises(quantplug.ArtefactError, match="is no language model: its 'get_max_context_len' is None"):
        quantplug.load_language_model(other.save(tmp_path / "other.pte"))


@pytest.mark.slow
def test_executorchs_runner_generates_the_same_text(xnnpack, tmp_path, capfd):
    pytest.importorskip("executorch.extension.llm.runner")
    import executorch.kernels.quantized  # noqa: F401  q/dq operators outside of delegates
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    _, artefact = xnnpack
    path, folder = artefact.save(tmp_path / "model.pte"), write_folder(tmp_path / "folder", causal())
    reader, prompt = tokenizer(), "a cab fed a bad egg"
    ids = reader(prompt).input_ids
    expected = list(artefact.generate(ids, 40, stop=()))
    runner = TextLLMRunner(str(path), str(folder / "tokenizer.json"))
    for _ in range(2):
        pieces: list[str] = []
        options = GenerationConfig(echo=False, max_new_tokens=40, temperature=0.0)
        runner.generate(prompt, options, pieces.append, None)
        assert len(pieces) == len(expected) == 40
        assert "".join(pieces) == reader.decode(expected)
        runner.reset()
    assert len(set(expected)) > 5


@pytest.mark.slow
def test_what_the_file_says(xnnpack, tmp_path):
    from quantplug.lowering.xnnpack.runtime import constants_of

    assert constants_of(xnnpack[1].save(tmp_path / "model.pte").read_bytes()) == {
        "get_max_seq_len": 128,
        "get_max_context_len": CONTEXT,
        "get_vocab_size": VOCABULARY,
        "get_n_layers": 1,
        "get_bos_id": 1,
        "get_eos_ids": 2,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": True,
        "enable_dynamic_shape": True,
    }


def placements_of_attention(artefact):
    return [row.placement for row in artefact.made.program.ops if "attention" in row.target]


def test_a_layer_is_one_delegate(xnnpack):
    """Caches are written and read between: a delegate before the first, one for each layer, one for the logits."""
    assert xnnpack[1].made.program.counts.delegates == 3
    assert placements_of_attention(xnnpack[1]) == ["portable"]


@pytest.mark.slow
def test_tables_of_embeddings(xnnpack, x86):
    assert xnnpack[1].made.report.row("embedding").quantized
    assert not x86[1].made.report.row("embedding").quantized
    model = causal(num_hidden_layers=1)
    for backend, said in (("xnnpack", "'int5'; choose one of"), ("x86", "'int5'; choose one of")):
        with pytest.raises(quantplug.ConfigError, match=f"has no tables of embeddings in {said}"):
            quantplug.quantize_language_model(model, backend, context=8, table="int5")
    kept = quantplug.quantize_language_model(model, "xnnpack", context=CONTEXT, table="float32", progress=False)
    assert not kept.made.report.row("embedding").quantized
    ids, start = texts(9)[0], torch.tensor([0])
    reference = copy.deepcopy(kept.made.reference)
    assert sqnr(kept.program(ids, start)[0], reference(ids, start)[0]) > 30


def test_perplexity_and_speed(x86):
    model, artefact = x86
    pieces = texts(30, 2)
    with torch.no_grad():
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in pieces]
    expected = math.exp(float(sum(losses)) / 2)
    assert perplexity(model, pieces) == pytest.approx(expected, rel=1e-5)
    assert perplexity(artefact, pieces) == pytest.approx(expected, rel=0.02)
    found = speed(artefact, 8, 4)
    assert found.prefill > 0 < found.decode
    assert (found.prompt, found.decoded) == (8, 4)
    with pytest.raises(quantplug.CalibrationError, match="no text of two tokens"):
        perplexity(model, [torch.tensor([[1]])])


def test_8da4w_is_another_name():
    backend = quantplug.get_quantizer("xnnpack").backend
    assert "8da4w" not in backend.configs
    assert backend.config("8da4w") == backend.config("int4_dynamic_groups")
    assert quantplug.derive(backend, "other", configs={"int8": backend.configs["int8"]}).aliases == {}
