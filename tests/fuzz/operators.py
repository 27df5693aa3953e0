"""The operators that random models are made of, one function each: it writes a step and returns its expression."""

from fuzz.generate import Draft, MisfitError, operator

_ACTIVATIONS = {
    "ReLU": ("F.relu({})", "torch.relu({})", "{}.relu()"),
    "ReLU6": ("F.relu6({})",),
    "Hardtanh": ("F.hardtanh({})", "F.hardtanh({}, -0.7, 1.4)"),
    "Hardswish": ("F.hardswish({})",),
    "Hardsigmoid": ("F.hardsigmoid({})",),
    "SiLU": ("F.silu({})", "{0} * torch.sigmoid({0})"),
    "GELU": ("F.gelu({})", 'F.gelu({}, approximate="tanh")'),
    "LeakyReLU": ("F.leaky_relu({})", "F.leaky_relu({}, 0.2)"),
    "Tanh": ("torch.tanh({})", "{}.tanh()"),
    "Sigmoid": ("torch.sigmoid({})", "{}.sigmoid()"),
    "ELU": ("F.elu({})",),
    "PReLU": ("F.relu({})",),
    "Softplus": ("F.softplus({})",),
    "Mish": ("F.mish({})",),
}
_IN_PLACE = (
    "F.relu({}, inplace=True)",
    "{}.relu_()",
    "{}.clamp_(-1.0, 2.0)",
    "F.hardtanh({}, -1.0, 1.0, inplace=True)",
    "F.leaky_relu({}, 0.1, inplace=True)",
    "{}.mul_(0.5)",
    "{}.add_(0.25)",
    "{}.sigmoid_()",
    "{}.tanh_()",
    "F.hardswish({}, inplace=True)",
    "F.silu({}, inplace=True)",
    "F.elu({}, inplace=True)",
)


def activated(d: Draft, expression: str) -> str:
    """Returns the expression, often with an activation behind it."""
    if not d.chance(0.5):
        return expression
    kind = d.pick(*_ACTIVATIONS, "ReLU", "ReLU", "ReLU")
    if d.chance(0.4):
        inplace = (
            "inplace=True"
            if kind in ("ReLU", "ReLU6", "Hardswish", "SiLU", "LeakyReLU", "ELU") and d.chance(0.5)
            else ""
        )
        return f"{d.module(f'nn.{kind}({inplace})')}({expression})"
    return d.pick(*_ACTIVATIONS[kind]).format(f"({expression})" if "{0}" not in _ACTIVATIONS[kind] else expression)


def _fits(size: int, kernel: int, dilation: int, padding: int) -> bool:
    return size + 2 * padding >= dilation * (kernel - 1) + 1


def convolved(d: Draft, x: str, dims: int) -> str:
    channels, *sizes = d.shape(x)[-dims - 1 :]
    groups = d.pick(1, 1, *[g for g in (2, 4, channels) if channels % g == 0])
    out = groups * d.pick(1, 2, 3) if groups > 1 else d.pick(2, 4, 6, 8)
    kernel = [d.pick(1, 2, 3, 3, 5 if dims < 3 else 3) for _ in sizes]
    dilation = [d.pick(1, 1, 1, 2) for _ in sizes]
    padding = [d.pick(0, k * r // 2, k // 2) for k, r in zip(kernel, dilation, strict=True)]
    stride = [d.pick(1, 1, 2, 3) for _ in sizes]
    mode = d.pick("zeros", "zeros", "zeros", "zeros", "reflect", "replicate", "circular")
    if not all(map(_fits, sizes, kernel, dilation, padding)):
        raise MisfitError
    arguments = f"{channels}, {out}, {tuple(kernel)}, {tuple(stride)}, {tuple(padding)}, {tuple(dilation)}, {groups}"
    made = d.module(f'nn.Conv{dims}d({arguments}, bias={d.chance(0.7)}, padding_mode="{mode}")')
    expression = f"{made}({x})"
    if d.chance(0.4) and len(d.shape(x)) == dims + 2:
        expression = f"{normalized(d, dims, out)}({expression})"
    return activated(d, expression)


def normalized(d: Draft, dims: int, channels: int) -> str:
    norm = d.module(f"nn.BatchNorm{dims}d({channels}, affine={d.chance(0.8)})")
    d.init.append(f"{norm}.running_mean.normal_(0, 0.2); {norm}.running_var.uniform_(0.5, 1.5)")
    return norm


@operator(4)
def conv2d(d: Draft) -> str:
    return convolved(d, d.value(4), 2)


@operator(2)
def conv1d(d: Draft) -> str:
    return convolved(d, d.value(3), 1)


@operator(1)
def conv3d(d: Draft) -> str:
    return convolved(d, d.value(5), 3)


@operator(0.2)
def conv2d_unbatched(d: Draft) -> str:
    d.fixed()
    return convolved(d, d.value(3), 2)


@operator(1)
def depthwise(d: Draft) -> str:
    x = d.value(4)
    c, h, w = d.shape(x)[1:]
    k = d.pick(3, 3, 5)
    if min(h, w) < k:
        raise MisfitError
    made = d.module(f"nn.Conv2d({c}, {c * d.pick(1, 1, 2)}, {k}, {d.pick(1, 2)}, {k // 2}, groups={c})")
    return activated(d, f"{made}({x})")


@operator(1.2)
def conv_transpose(d: Draft) -> str:
    dims = d.pick(1, 2, 2)
    x = d.value(dims + 2)
    c = d.shape(x)[1]
    groups = d.pick(1, 1, *[g for g in (2, c) if c % g == 0])
    kernel, stride = d.pick(2, 3, 4), d.pick(1, 2, 2)
    out = groups * d.pick(1, 2, 4)
    arguments = f"{c}, {out}, {kernel}, {stride}, {d.pick(0, 1)}, {d.pick(0, 0, stride - 1)}"
    expression = f"{d.module(f'nn.ConvTranspose{dims}d({arguments}, groups={groups}, bias={d.chance(0.7)})')}({x})"
    if d.chance(0.3):
        expression = f"{normalized(d, dims, out)}({expression})"
    return activated(d, expression)


@operator(0.6)
def functional_conv2d(d: Draft) -> str:
    x = d.value(4)
    c = d.shape(x)[1]
    weight = d.module(f"nn.Parameter(torch.randn({d.pick(2, 4)}, {c}, 3, 3) * 0.2)")
    return activated(d, f"F.conv2d({x}, {weight}, padding={d.pick(1, (1, 0), 2)})")


@operator(4)
def linear(d: Draft) -> str:
    x = d.value(2, 3, 4)
    made = d.module(f"nn.Linear({d.shape(x)[-1]}, {d.pick(4, 6, 8, 16, d.shape(x)[-1])}, bias={d.chance(0.75)})")
    return activated(d, f"{made}({x})")


@operator(0.5)
def functional_linear(d: Draft) -> str:
    x = d.value(2, 3)
    width = d.shape(x)[-1]
    weight = d.module(f"nn.Parameter(torch.randn({width}, {width}) * 0.3)")
    return activated(d, d.pick(f"F.linear({x}, {weight})", f"{x} @ {weight}", f"torch.matmul({x}, {weight}.t())"))


@operator(0.4)
def addmm(d: Draft) -> str:
    x = d.value(2)
    width, out = d.shape(x)[-1], d.pick(4, 6)
    weight, bias = (
        d.module(f"nn.Parameter(torch.randn({width}, {out}) * 0.3)"),
        d.module(f"nn.Parameter(torch.randn({out}))"),
    )
    return f"torch.addmm({bias}, {x}, {weight})"


@operator(0.8)
def shared_module(d: Draft) -> str:
    """Calls a module of an earlier step again."""
    fitting = [(path, step, n) for path, step, shape in d.made for n, t in d.values.items() if tuple(t.shape) == shape]
    if not fitting:
        raise MisfitError
    path, step, name = d.random.choice(fitting)
    d.owns.append(step)
    return activated(d, f"{path}({d.read(name)})")


@operator(0.4)
def tied_weight(d: Draft) -> str:
    """An embedding whose table is a linear's weight too, or two linears with one weight."""
    x = d.value(2, 3)
    width = d.shape(x)[-1]
    first, second = d.module(f"nn.Linear({width}, {width})"), d.module(f"nn.Linear({width}, {width}, bias=False)")
    d.init.append(f"{second}.weight = {first}.weight")
    return f"{second}(F.relu({first}({x})))"


@operator(1)
def embedding(d: Draft) -> str:
    tokens = [n for n, t in d.values.items() if not t.is_floating_point()]
    if not tokens:
        raise MisfitError
    return f"{d.module(f'nn.Embedding(20, {d.pick(4, 8, 16)})')}({d.read(d.random.choice(tokens))})"


@operator(0.5)
def batch_norm(d: Draft) -> str:
    x = d.value(3, 4)
    return f"{normalized(d, len(d.shape(x)) - 2, d.shape(x)[1])}({x})"


@operator(1)
def layer_norm(d: Draft) -> str:
    x = _wide(d, 2, 3, 4)
    return f"{d.module(f'nn.LayerNorm({d.shape(x)[-1]})')}({x})"


def _wide(d: Draft, *ranks: int) -> str:
    """Picks a value of four columns or more: normalized, two are little more than the sign of their difference."""
    x = d.value(*ranks)
    if d.shape(x)[-1] < 4:
        raise MisfitError
    return x


@operator(0.5)
def group_norm(d: Draft) -> str:
    x = d.value(3, 4)
    c = d.shape(x)[1]
    return f"{d.module(f'nn.GroupNorm({d.pick(1, *[g for g in (2, 4) if c % g == 0])}, {c})')}({x})"


@operator(0.3)
def instance_norm(d: Draft) -> str:
    x = d.value(4)
    return f"{d.module(f'nn.InstanceNorm2d({d.shape(x)[1]}, affine={d.chance(0.5)})')}({x})"


@operator(0.3)
def rms_norm(d: Draft) -> str:
    x = _wide(d, 2, 3)
    return f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5)"


@operator(2)
def activation(d: Draft) -> str:
    x = d.value(2, 3, 4, 5)
    kind = d.pick(*_ACTIVATIONS)
    if kind != "PReLU" and d.chance(0.6):
        return d.pick(*_ACTIVATIONS[kind]).format(x)
    return f"{d.module(f'nn.{kind}()')}({x})"


@operator(1.5)
def in_place(d: Draft) -> str:
    """Changes a fresh value, or one that others may read."""
    x = d.value(2, 3, 4, where=lambda t: True)
    if x.startswith("x"):
        raise MisfitError
    return d.pick(*_IN_PLACE).format(x if d.chance(0.5) else f"({x} + 0.1)" if d.chance(0.5) else f"({x} * 1.5)")


@operator(1)
def max_pool(d: Draft) -> str:
    dims = d.pick(1, 2, 2)
    x = d.value(dims + 2)
    k = d.pick(2, 3)
    stride, padding = d.pick(1, 2, k), d.pick(0, 0, 1)
    extra = f", ceil_mode={d.chance(0.3)}, dilation={d.pick(1, 1, 2)}"
    if d.chance(0.5):
        return f"{d.module(f'nn.MaxPool{dims}d({k}, {stride}, {padding}{extra})')}({x})"
    return f"F.max_pool{dims}d({x}, {k}, {stride}, {padding}{extra})"


@operator(1)
def avg_pool(d: Draft) -> str:
    dims = d.pick(1, 2, 2)
    x = d.value(dims + 2)
    k = d.pick(2, 3)
    return f"F.avg_pool{dims}d({x}, {k}, {d.pick(1, 2, k)}, {d.pick(0, 0, 1)}, {d.chance(0.2)}, {d.chance(0.7)})"


@operator(1)
def adaptive_pool(d: Draft) -> str:
    dims = d.pick(1, 2, 2)
    x = d.value(dims + 2)
    size = d.pick(1, 1, 2, 3) if dims == 1 else d.pick(1, 1, (1, 1), 2, (2, 3))
    return f"F.adaptive_avg_pool{dims}d({x}, {size})"


@operator(0.3)
def adaptive_max_pool(d: Draft) -> str:
    return f"F.adaptive_max_pool2d({d.value(4)}, {d.pick(1, 2)})"


@operator(1)
def global_mean(d: Draft) -> str:
    x = d.value(4)
    return d.pick(f"{x}.mean((2, 3))", f"{x}.mean([-1, -2], keepdim=True)", f"{x}.mean(-1).mean(-1)")


@operator(1.5)
def cat(d: Draft) -> str:
    x = d.value(2, 3, 4)
    dim = d.dimension(x)
    shape = d.shape(x)
    others = [
        n
        for n, t in d.values.items()
        if t.is_floating_point()
        and t.dim() == len(shape)
        and all(i == dim or a == b for i, (a, b) in enumerate(zip(t.shape, shape, strict=True)))
    ]
    names = [x, *(d.read(d.random.choice(others)) for _ in range(d.pick(1, 1, 2)))]
    d.random.shuffle(names)
    return f"torch.cat([{', '.join(names)}], {d.pick(dim, dim - len(shape))})"


@operator(0.4)
def stack(d: Draft) -> str:
    x = d.value(2, 3)
    return f"torch.stack([{x}, {d.like(x)}], {d.pick(1, -1)})"


@operator(1)
def split(d: Draft) -> str:
    x = d.value(2, 3, 4)
    dim = d.dimension(x)
    size = d.shape(x)[dim]
    if size < 2:
        raise MisfitError
    if size % 2 == 0 and d.chance(0.6):
        a, b = f"p{d.number}", f"q{d.number}"
        how = d.pick(f"{x}.chunk(2, {dim})", f"torch.split({x}, {size // 2}, {dim})")
        d.before.append(f"{a}, {b} = {how}")
        return d.pick(f"{a} * torch.sigmoid({b})", f"torch.cat([{b}, {a}], {dim})", f"{a} + {b}", f"{a} - {b}")
    at = d.random.randrange(1, size)
    return f"torch.split({x}, [{at}, {size - at}], {dim})[{d.pick(0, 1)}]"


@operator(1)
def sliced(d: Draft) -> str:
    x = d.value(2, 3, 4)
    dim = d.dimension(x)
    size = d.shape(x)[dim]
    index = ":, " * dim
    start, step = d.random.randrange(0, max(1, size // 2)), d.pick(1, 1, 2)
    return d.pick(
        f"{x}[{index}{start}::{step}]",
        f"{x}.narrow({dim}, {start}, {size - start})",
        f"{x}[{index}:{max(1, size - 1)}]",
    )


@operator(0.7)
def select(d: Draft) -> str:
    x = d.value(3, 4)
    dim = d.dimension(x)
    return d.pick(f"{x}.select({dim}, 0)", f"{x}[{':, ' * dim}-1]", f"{x}.unbind({dim})[0]")


@operator(1)
def permuted(d: Draft) -> str:
    x = d.value(3, 4)
    rank = len(d.shape(x))
    order = list(range(1 if d.is_dynamic or d.chance(0.7) else 0, rank))
    d.random.shuffle(order)
    order = [*range(rank - len(order)), *order]
    tail = d.pick("", ".contiguous()", ".clone()")
    return f"{x}.permute({', '.join(map(str, order))}){tail}"


@operator(1)
def transposed(d: Draft) -> str:
    x = d.value(2, 3, 4)
    return f"{x}.transpose({d.dimension(x)}, {d.dimension(x)}){d.pick('', '.contiguous()')}"


@operator(1)
def flattened(d: Draft) -> str:
    x = d.value(3, 4)
    return d.pick(f"{x}.flatten(1)", f"{x}.reshape({x}.shape[0], -1)", f"{x}.flatten(2)", f"torch.flatten({x}, 1)")


@operator(1)
def viewed(d: Draft) -> str:
    x = d.value(2, 3, 4)
    shape = list(d.shape(x))
    at = d.random.randrange(1, len(shape))
    factor = d.pick(*[f for f in (2, 3, 4) if shape[at] % f == 0] or [1])
    if len(shape) == 4 or factor == 1:
        sizes = [*shape[1:at], shape[at] * (shape[at + 1] if at + 1 < len(shape) else 1), *shape[at + 2 :]]
    else:
        sizes = [*shape[1:at], factor, shape[at] // factor, *shape[at + 1 :]]
    batch = d.pick(f"{x}.shape[0]", f"{x}.size(0)", "-1") if d.is_dynamic else d.pick(f"{x}.shape[0]", shape[0], "-1")
    return f"{x}.{d.pick('reshape', 'reshape', 'view')}({batch}, {', '.join(map(str, sizes))})"


@operator(0.5)
def squeezed(d: Draft) -> str:
    x = d.value(2, 3)
    return d.pick(f"{x}.unsqueeze({d.pick(1, -1)})", f"{x}[:, None]", f"{x}.unsqueeze(2)")


@operator(0.5)
def flipped(d: Draft) -> str:
    x = d.value(2, 3, 4)
    dim = d.dimension(x)
    return d.pick(
        f"{x}.flip({dim})", f"torch.roll({x}, {d.pick(1, -2)}, {dim})", f"torch.roll({x}, (1, -1), ({dim}, -1))"
    )


@operator(0.8)
def padded(d: Draft) -> str:
    x = d.value(3, 4)
    mode = d.pick('"constant", 0.0', '"constant", 0.0', '"constant", 0.5', '"reflect"', '"replicate"')
    return f"F.pad({x}, {d.pick((1, 1), (0, 2), (2, 1, 1, 0), (1, 1, 1, 1))}, {mode})"


@operator(0.4)
def pixel_shuffle(d: Draft) -> str:
    x = d.value(4, where=lambda t: t.shape[1] % 4 == 0 or t.shape[-1] % 2 == 0)
    return f"F.pixel_shuffle({x}, 2)" if d.shape(x)[1] % 4 == 0 else f"F.pixel_unshuffle({x}, 2)"


@operator(0.5)
def channel_shuffle(d: Draft) -> str:
    x = d.value(4, where=lambda t: t.shape[1] % 2 == 0 and t.shape[1] > 2)
    c, h, w = d.shape(x)[1:]
    if d.chance(0.3):
        return f"F.channel_shuffle({x}, 2)"
    last = d.pick(f"view({x}.shape[0], -1, {h}, {w})", f"reshape({x}.shape[0], {c}, {h}, {w})", "flatten(1, 2)")
    return f"{x}.view({x}.shape[0], 2, {c // 2}, {h}, {w}).transpose(1, 2).contiguous().{last}"


@operator(0.5)
def upsampled(d: Draft) -> str:
    x = d.value(4)
    how = d.pick('mode="nearest"', 'mode="bilinear", align_corners=False', 'mode="bilinear", align_corners=True')
    return f"F.interpolate({x}, scale_factor=2, {how})"


@operator(3)
def arithmetic(d: Draft) -> str:
    x = d.value(2, 3, 4, 5)
    y = d.like(x)
    return activated(
        d, d.pick(f"{x} + {y}", f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"torch.add({x}, {y}, alpha=0.5)")
    )


@operator(0.8)
def with_scalar(d: Draft) -> str:
    x = d.value(2, 3, 4)
    return d.pick(
        f"{x} * 0.7",
        f"{x} + 1.0",
        f"1.0 - {x}",
        f"{x} / 2.5",
        f"-{x}",
        f"{x} * {x}.shape[-1] ** -0.5",
        f"{x}.abs()",
        f"{x}.pow(2)",
        f"{x} / ({x}.abs() + 1.0)",
        f"torch.sqrt({x}.abs() + 0.1)",
        f"{x}.square()",
        f"torch.exp(-{x}.abs())",
        f"torch.clamp({x}, -0.5, 1.5)",
        f"{x}.clamp(min=0.0)",
        f"torch.maximum({x}, {x} * 0.1)",
        f"torch.where({x} > 0, {x}, {x} * 0.3)",
        f"{x}.masked_fill({x} < -1, 0.0)",
        f"F.dropout({x}, 0.5, self.training)",
        f"torch.minimum({x}, 1 - {x})",
    )


@operator(0.7)
def broadcast(d: Draft) -> str:
    x = d.value(2, 3, 4)
    constant = d.module(f"nn.Parameter(torch.randn({', '.join(map(str, d.shape(x)[1:]))}))")
    return d.pick(f"{x} + {constant}", f"{x} * {constant}", f"{x} - {constant}")


@operator(1)
def residual(d: Draft) -> str:
    x = d.value(2, 3, 4)
    shape = d.shape(x)
    if len(shape) == 4:
        inner = f"{d.module(f'nn.Conv2d({shape[1]}, {shape[1]}, 3, padding=1)')}({x})"
    else:
        inner = f"{d.module(f'nn.Linear({shape[-1]}, {shape[-1]})')}({x})"
    if d.chance(0.2):
        d.before.append(f"r{d.number} = {inner}")
        d.before.append(f"r{d.number} += {x}")
        return activated(d, f"r{d.number}")
    return activated(d, d.pick(f"{x} + {inner}", f"{inner} + {x}", f"{inner} * {x}", f"{x} - {inner}"))


@operator(0.7)
def gate(d: Draft) -> str:
    """Squeeze and excitation."""
    x = d.value(4)
    c = d.shape(x)[1]
    first, second = d.module(f"nn.Conv2d({c}, 2, 1)"), d.module(f"nn.Conv2d(2, {c}, 1)")
    pooled = d.pick(f"F.adaptive_avg_pool2d({x}, 1)", f"{x}.mean((2, 3), keepdim=True)")
    return f"{x} * {d.pick('torch.sigmoid', 'F.hardsigmoid')}({second}(F.relu({first}({pooled}))))"


@operator(0.8)
def reduction(d: Draft) -> str:
    x = d.value(2, 3, 4)
    dim, keep = d.dimension(x), d.chance(0.5)
    # The spread of two or three numbers that are nearly equal is a matter of chance in integers.
    spread = "std" if d.shape(x)[dim] >= 6 else "mean"
    return d.pick(
        f"{x}.mean({dim}, keepdim={keep})",
        f"{x}.sum({dim}, keepdim={keep})",
        f"{x}.amax({dim}, keepdim={keep})",
        f"{x}.max({dim})[0]",
        f"{x}.{spread}({dim}, keepdim={keep})",
        f"{x}.amin({dim})",
        f"torch.logsumexp({x}, {dim})",
    )


@operator(0.6)
def softmax(d: Draft) -> str:
    x = d.value(2, 3, 4)
    return d.pick(f"F.softmax({x}, -1)", f"F.softmax({x}, {d.dimension(x)})", f"F.log_softmax({x}, -1)")


@operator(0.6)
def cumulative(d: Draft) -> str:
    x = d.value(2, 3)
    return d.pick(
        f"torch.cumsum({x}, -1) * 0.3",
        f"{x}.repeat(1, {', '.join('1' * (len(d.shape(x)) - 2) + '2')})",
        f"F.normalize({x}, dim=-1)",
        f"{x}.repeat_interleave(2, -1)",
        f"{x}.unfold(-1, 2, 1).mean(-1)",
    )


@operator(0.8)
def matmul(d: Draft) -> str:
    x = d.value(3, 4)
    y = d.like(x)
    return d.pick(
        f"{x} @ {y}.transpose(-1, -2)",
        f"torch.matmul({x}.transpose(-1, -2), {y})",
        f"torch.bmm({x}, {y}.transpose(1, 2))",
        f'torch.einsum("bij,bkj->bik", {x}, {y})',
    )


@operator(1)
def attention(d: Draft) -> str:
    x = d.value(3)
    length, width = d.shape(x)[1:]
    heads = d.pick(1, 2)
    if width % heads:
        raise MisfitError
    q, k, v = (d.module(f"nn.Linear({width}, {width}, bias={d.chance(0.5)})") for _ in range(3))
    names = [f"q{d.number}", f"k{d.number}", f"w{d.number}"]
    for name, made in zip(names, (q, k, v), strict=True):
        d.before.append(f"{name} = {made}({x}).view({x}.shape[0], {length}, {heads}, {width // heads}).transpose(1, 2)")
    a, b, c = names
    fused = d.pick(
        f"F.scaled_dot_product_attention({a}, {b}, {c})",
        f"F.scaled_dot_product_attention({a}, {b}, {c}, is_causal=True)",
        f"F.softmax({a} @ {b}.transpose(-1, -2) * {(width // heads) ** -0.5:.4f}, -1) @ {c}",
    )
    out = d.module(f"nn.Linear({width}, {width})")
    return f"{out}({fused}.transpose(1, 2).reshape({x}.shape[0], {length}, {width}))"


@operator(0.3)
def multihead(d: Draft) -> str:
    x = d.value(3, where=lambda t: t.shape[-1] % 2 == 0)
    made = d.module(f"nn.MultiheadAttention({d.shape(x)[-1]}, 2, batch_first=True)")
    return f"{made}({x}, {x}, {x})[0]" if d.chance(0.5) else f"{made}({x}, {x}, {x}, need_weights=False)[0]"


@operator(0.2)
def encoder_layer(d: Draft) -> str:
    x = d.value(3, where=lambda t: t.shape[-1] % 2 == 0)
    made = d.module(
        f"nn.TransformerEncoderLayer({d.shape(x)[-1]}, 2, 16, batch_first=True, norm_first={d.chance(0.5)})"
    )
    return f"{made}({x})"


@operator(0.4)
def recurrent(d: Draft) -> str:
    x = d.value(3)
    kind = d.pick("LSTM", "GRU")
    made = d.module(f"nn.{kind}({d.shape(x)[-1]}, {d.pick(4, 6)}, batch_first=True, bidirectional={d.chance(0.2)})")
    return f"{made}({x})[0]"


@operator(0.4)
def scoped(d: Draft) -> str:
    """A layer in a scope of gradients or of mixed precision."""
    x = d.value(2, 3)
    made = d.module(f"nn.Linear({d.shape(x)[-1]}, {d.shape(x)[-1]})")
    scope = d.pick("torch.no_grad()", "torch.no_grad()", 'torch.autocast("cpu", enabled=False)')
    d.before.append(f"with {scope}:\n    s{d.number} = F.relu({made}({x}))")
    return f"s{d.number} + {x}"


@operator(0.4)
def counter(d: Draft) -> str:
    d.fixed()
    x, count = d.value(2, 3, 4), d.buffer("torch.zeros(())")
    d.before.append(f"{count}.add_(1.0)")
    return f"{x} * (1.0 + 0.1 * {count})"


@operator(0.4)
def moving_average(d: Draft) -> str:
    d.fixed()
    x = d.value(2, 3, 4)
    mean = d.buffer(f"torch.zeros({', '.join(map(str, d.shape(x)[1:]))})")
    d.before.append(f"{mean}.mul_(0.9).add_({x}.mean(0), alpha=0.1)")
    return f"{x} - {mean}"


@operator(0.5)
def cache(d: Draft) -> str:
    """What the last call wrote, read with what this one brings."""
    d.fixed()
    x = d.value(3)
    past = d.buffer(f"torch.zeros{d.shape(x)}".replace(",)", ")"))
    kind = d.pick("copy", "slice", "index", "assign")
    if kind == "copy":
        d.after.append(f"{past}.copy_({x})")
        return f"torch.cat([{past}, {x}], 1)"
    if kind == "slice":
        d.before.append(f"{past}[:, :1] = {x}[:, -1:]")
        return f"{past} + {x}"
    if kind == "assign":
        d.before.append(f"{past} = {past} * 0.5 + {x}")
        return f"{past} * 0.5 + {x}"
    place = d.buffer("torch.zeros(1, dtype=torch.long)")
    d.before.append(f"{past}.index_copy_(1, {place}, {x}[:, :1])")
    d.before.append(f"{place}.copy_(({place} + 1) % {d.shape(x)[1]})")
    return f"{past} * 1.0 + {x}"
