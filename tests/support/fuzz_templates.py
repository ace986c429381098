"""The lines that programs are drawn from: Python with holes.

`{F}` is a tensor; the letter says of which dtype: T any, F floating, R real (no boolean), C complex, N floating or
complex, I integer, B boolean. `{F~}` broadcasts with the first of the line, `{F=}` has its shape, `{I1}` has one
dimension, and `{1}` is the first again. Of the first are also `{d}` and `{e}`, dimensions, `{shape}`, a shape to give
it, and `{perm}`, an order of its dimensions. `{s}` is a number, `{k}` a count, `{D}` a dtype, `{ix}` an index; `{p}`
and `{b}` are a parameter and a buffer, `{x}` a new name, `{w}` a new parameter. Other holes are calls of new modules.

No template leaves values undefined, as `torch.empty` does, or ties to chance.
"""


def _templates(text: str) -> list[str]:
    return [" ".join(template.split()) for template in text.split(" ;")]


POINTWISE = _templates("""
    {F}.relu() ; torch.sigmoid({F}) ; {F}.tanh() ; F.gelu({F}) ; F.gelu({F}, approximate='tanh') ; F.silu({F}) ;
    F.elu({F}) ; F.softplus({F}) ; F.leaky_relu({F}, {s}) ; F.hardswish({F}) ; F.mish({F}) ; {F}.clamp({s}, 1.5) ;
    {F}.clamp(min={F~}) ; {N}.sin() ; {N}.cos() ; {F}.abs().sqrt() ; ({F}.abs() + 0.5).log() ;
    ({F}.abs() + 0.5).rsqrt() ; {N}.clamp_max(1).exp() ; torch.erf({F}) ; {F}.floor() ; {F}.round() ;
    torch.expm1({F}.clamp(max=2)) ; torch.log1p({F}.abs()) ; {F}.atan() ; {F}.square() ;
    {F}.reciprocal().clamp(-4, 4) ; {F}.sign() ; torch.frac({F}) ; {T}.abs() ; -{N} ; {R}.neg() ; {F}.trunc() ;
    {N} + {N~} ; {N} - {N~} ; {N} * {N~} ; {T} + {T~} ; {T} * {T~} ; {F} / ({F~}.abs() + 0.5) ; {R} / 3 ; {I} // 2 ;
    {I} % 3 ; {F} % 1.5 ; {F} // 0.7 ; {R} - {s} ; {s} - {R} ; {N} * {s} ; {R} ** 2 ; {F}.abs() ** {s} ;
    2 ** {F}.clamp(-3, 3) ; torch.maximum({R}, {R~}) ; torch.minimum({R}, {R~}) ; torch.atan2({F}, {F~}) ;
    torch.hypot({F}, {F~}) ; torch.fmod({F}, 2.5) ; torch.remainder({R}, 3) ; torch.copysign({F}, {F~}) ;
    torch.logaddexp({F}, {F~}) ; torch.addcmul({N}, {N~}, {N~}, value={s}) ;
    torch.addcdiv({F}, {F~}, {F~}.abs() + 1) ; torch.lerp({F}, {F=}, {s}) ; torch.add({T}, {T~}, alpha=2) ;
    torch.rsub({R}, {R~}) ; torch.nextafter({F}, {F=}) ; torch.xlogy({F}, {F~}.abs() + 1) ; {R} > {R~} ;
    {R} <= {s} ; {R} == {R~} ; {T} != {T~} ; {B} & {B~} ; {B} ^ {B~} ; ~{B} ; {I} & {I~} ; {I} << 1 ;
    {I}.bitwise_or(5) ; torch.where({B}, {T~}, {T~}) ; torch.where({B}, {F~}, {s}) ;
    torch.where({F} > 0, {1}, {1} * 2) ; {F}.isnan() ; {T}.logical_not() ; {T}.logical_or({T~}) ; {T}.bool() ;
    {F}.masked_fill({B~}, {s}) ; {F}.masked_fill({1} > 0.5, {s}) ; torch.heaviside({F}, {F~}) ;
    torch.clamp({F}, -{k}, {k}) ; {F}.nan_to_num(0.5) ; torch.sinc({F}) ; {F}.logit(0.2) ; F.hardtanh({F}) ;
    F.threshold({F}, 0.1, 0.7) ; F.prelu({F}, {F~}) ; F.celu({F}) ; F.selu({F}) ; F.logsigmoid({F}) ;
    torch.bitwise_xor({I}, {I~}) ; torch.gcd({I}, {I~}) ; {C}.real ; {C}.imag ; {C}.conj() ; {C}.abs() ;
    {C}.angle() ; torch.complex({F}, {1} * 2) ; {F} * 1j ; torch.polar({F}.abs(), {1}) ; torch.view_as_real({C}) ;
    {C}.conj() * {C~} ; cast({T}, {D}) ; cast({F}, F16) ; cast({F}, BF16) ; cast({F}, F32) ; cast({F}, F64) ;
    cast({N}, C64) ; {T} + size ; {F} * scalar ; {F}.to({F~}.dtype) ; {F}.type_as({R~}) ; torch.special.i0({F}) ;
    torch.special.erfcx({F}.abs()) ; torch.digamma({F}.abs() + 1)
""")
VIEWS = _templates("""
    {T}[{ix}] ; {T}[{ix}] ; {T}.transpose({d}, {e}) ; {T}.mT ; {T}.permute({perm}) ; {T}.unsqueeze({d}) ;
    {T}.squeeze() ; {T}.reshape({shape}) ; {T}.view({shape}) ; {T}.flatten() ; {T}.flip({d}) ; {T}.roll({k}, {d}) ;
    {T}.expand(2, *{1}.shape) ; {T}.narrow({d}, 0, 2) ; {T}.select({d}, 0) ; {T}.diagonal() ;
    {T}.movedim({d}, {e}) ; {T}.unfold({d}, 2, 1) ; {T}.contiguous() ; {T}.clone() ; {T}.detach() ;
    {T}.as_strided((2, 2), (1, 2)) ; {T}.repeat({k}, *([1] * ({1}.dim() - 1))) ; {T}.repeat_interleave(2, {d}) ;
    torch.cat([{T}, {T=}], {d}) ; torch.stack([{T}, {T=}], {d}) ; {T}.tile((2,)) ;
    torch.broadcast_to({T}, (2, *{1}.shape)) ; torch.atleast_2d({T}) ; {T}.view_as({T=}) ; {T}.expand_as({T~}) ;
    {T}.t() ; torch.rot90({T}) ; F.pad({T}, (1, 1)) ; F.pad({F}, (0, 2), value={s}) ;
    F.pad({F}, (1, 0), mode='replicate') ; {T}.tril() ; {T}.triu(1) ; {T}.swapaxes({d}, {e}) ; {T}.ravel() ;
    torch.hstack([{T}, {T=}]) ; {T}[None] ; {T}[..., ::2] ; torch.diag_embed({T}) ; torch.block_diag({T}, {T~}) ;
    torch.meshgrid({T}, {T}, indexing='ij')[0] ; {T}.chunk(2, {d})[-1] ; {T}.split(2, {d})[0] ;
    {T}.unbind({d})[-1] ; torch.tensor_split({T}, 2, {d})[0] ; {T}.unflatten({d}, (-1, 2)) ;
    {F}.view(torch.int16) if {1}.element_size() == 2 else {1} ; {F}.to(memory_format=torch.contiguous_format) ;
    {F}.reshape({1}.shape[0], -1) ; {F}.reshape(-1, {1}.shape[-1]) ; {T}.data ; torch.view_as_complex({F}) ;
    {T}.resolve_conj()
""")
REDUCTIONS = _templates("""
    {T}.sum() ; {T}.sum({d}) ; {N}.mean({d}, keepdim=True) ; {N}.mean() ; {F}.amax({d}) ;
    {R}.amin({d}, keepdim=True) ; {F}.max() ; {F}.var({d}) ; {F}.std() ; {F}.norm() ;
    torch.linalg.vector_norm({F}, dim={d}) ; {N}.prod({d}) ; {F}.softmax({d}) ; {F}.log_softmax({d}) ;
    {F}.logsumexp({d}) ; {R}.cumsum({d}) ; {F}.cumprod({d}) ; {F}.cummax({d}).values ; {T}.any() ; {T}.all({d}) ;
    {R}.argmax() ; {R}.argmax({d}) ; {F}.argmin({d}) ; {T}.count_nonzero({d}) ; {F}.median({d}).values ;
    {F}.sort({d}, stable=True).values ; {F}.sort({d}, descending=True, stable=True).indices ;
    {F}.topk(2, {d}).values ; {F}.topk(1, {d}).indices ; {R}.argsort({d}, stable=True) ;
    {F}.kthvalue(1, {d}).values ; {F}.nansum({d}) ; {F}.sum({d}, dtype=F32) ; {T}.sum(dtype=F32) ;
    F.normalize({F}, dim={d}) ; {F}.aminmax().max ; {F}.diff(dim={d}) ; {F}.std({d}, correction=0) ;
    torch.var_mean({F}, {d})[1] ; torch.trace({N}) ; {F}.quantile(0.5) ; {F}.logcumsumexp({d}) ;
    {R}.max({d}).values ; {R}.min({d}).indices ; F.cosine_similarity({F}, {F=}, dim={d}) ; {F}.unique() ;
    torch.dist({F}, {F=}) ; torch.histc({F}, 4, -2, 2) ; torch.bincount({I}.flatten().clamp(0, 5), minlength=6) ;
    {F}.mode({d}).values
""")
INDEXING = _templates("""
    {T}[{I}.clamp(0, 1)] ; {T}[:, {I}.clamp(0, 1)] ; {T}[{B=}] ; {F}[{1} > 0] ;
    {T}.index_select({d}, {I1}.clamp(0, 1)) ; {T}.gather({d}, torch.zeros_like({1}, dtype=I64)) ;
    {T}.gather({d}, {1}.argsort({d}, stable=True)) ; {T}.take({I}.clamp(0, 1)) ;
    {F}.scatter({d}, {1}.argsort({d}, stable=True), {1}) ; {T}.nonzero() ;
    {F}.scatter_add({d}, torch.zeros_like({1}, dtype=I64), {1}) ;
    {F}.index_add({d}, {I1}.clamp(0, 1)[:1], {1}.narrow({d}, 0, 1)) ; {T}.index_fill({d}, {I1}.clamp(0, 1), 1) ;
    torch.take_along_dim({T}, {I=}.clamp(0, 1), {d}) ; {F}.masked_select({B~}) ;
    {F}.index_put(({I1}.clamp(0, 1),), {F~}) ; {F}.index_put(({I1}.clamp(0, 1),), {F~}, accumulate=True) ;
    torch.searchsorted({F}.sort(-1, stable=True).values, {F=}) ; torch.bucketize({F}, torch.linspace(-1, 1, 4)) ;
    F.one_hot({I}.clamp(0, 3), 4) ; {F}.select_scatter({F}.select({d}, 0), {d}, 0) ;
    {F}.scatter_reduce({d}, torch.zeros_like({1}, dtype=I64), {1}, 'amax') ;
    {F}.slice_scatter({1}[:1] * 2, 0, 0, 1) ; {F}.masked_scatter({B=}, {1} * 2) ; {T}[{I1}.clamp(0, 1), 0] ;
    {F}.diagonal_scatter({F}.diagonal() * 2) ; torch.argwhere({B}) ; torch.isin({I}, {I}) ;
    F.embedding({I}.clamp(0, 1), {F})
""")
PRODUCTS = _templates("""
    {N} @ {N} ; {N} @ {1}.mT ; {N} @ {N=}.mT ; {F}.mT @ {1} ; torch.einsum('...i,...j->...ij', {N}, {N=}) ;
    torch.outer({F}, {F}) ; F.linear({F}, {w}) ; F.linear({F}, {w}, None).relu() ; {linear} ;
    F.layer_norm({F}, {1}.shape[-1:]) ; F.rms_norm({F}, {1}.shape[-1:]) ; F.group_norm({F}, 1) ;
    F.batch_norm({F}, None, None, training=True) ; {conv} ; {pool} ;
    F.scaled_dot_product_attention({F}, {F=}, {F=}) ;
    F.scaled_dot_product_attention({F}, {1}, {F=}, is_causal=True) ; ({F} @ {1}.mT * 0.5).softmax(-1) @ {1} ;
    (({F} @ {F=}.mT) / 2).masked_fill({B~}, -1e9).softmax(-1) @ {1} ; torch.baddbmm({F}, {F}, {F}) ;
    torch.addmm({F}, {F}, {1}.mT) ; torch.bmm({N}, {1}.mT) ; torch.dot({N}.flatten(), {1}.flatten()) ;
    torch.tensordot({N}, {N=}, {1}.dim()) ; torch.kron({F}, {F}) ; torch.cdist({F}, {F}) ;
    F.bilinear({F}, {1}, torch.ones(2, {1}.shape[-1], {1}.shape[-1], dtype={1}.dtype)) ;
    torch.linalg.inv({N} @ {1}.mH + 2 * torch.eye({1}.shape[-2], dtype={1}.dtype)) ;
    torch.linalg.det({F}[..., :2, :2]) ; torch.fft.fft({N}) ; torch.fft.rfft({F}) ; torch.fft.irfft({C}) ;
    torch.linalg.cross({F}, {F=}) ; F.mse_loss({F}, {F=}) ; F.l1_loss({F}, {F=}) ; F.smooth_l1_loss({F}, {F=}) ;
    F.cross_entropy({F}, {1}.softmax(-1)) ; F.nll_loss({F}.log_softmax(-1), {1}.argmax(-1)) ;
    F.kl_div({F}, {F=}.softmax(-1), reduction='batchmean') ;
    F.binary_cross_entropy_with_logits({F}, {F=}.sigmoid()) ; F.interpolate({F}, scale_factor=2) ; {embedding} ;
    {bn} ; {lstm} ; {mha} ; torch.addbmm({F}, {F}, {F}) ;
    torch.linalg.solve({F} @ {1}.mT + 2 * torch.eye({1}.shape[-2], dtype={1}.dtype), {1}) ; F.glu({F}, {d}) ;
    F.pixel_shuffle({F}, 2) ; F.huber_loss({F}, {F=})
""")
RANDOM = _templates("""
    F.dropout({F}, 0.4) ; F.dropout({F}, 0.4, training=True) + {1} ; torch.rand_like({F}) ; torch.randn({F}.shape) ;
    torch.rand(3, 4) ; torch.bernoulli({F}.sigmoid()) ; torch.randint(0, 4, (3, 4)) ; torch.randperm(4) ;
    torch.rand(size, 2) ; F.dropout1d({F}) ; torch.normal({F}, 1.0) ; {F} * torch.rand(()) ;
    torch.multinomial({F}.softmax(-1), 2) ; torch.randn_like({F}) * {1} ; {F}.clone().uniform_() ;
    F.rrelu({F}, training=True) ; torch.empty(3, 4).normal_()
""")
OTHERS = _templates("""
    torch.ops.fuzz.affine({F}, 2.0, 0.5) ; Square.apply({F}) ;
    torch.utils.checkpoint.checkpoint(lambda t: t.sin() * t, {F}, use_reentrant=False) ;
    torch.vmap(lambda row: row * row.sum())({F}) ; torch.zeros({T}.shape[0], 3) ; torch.arange(size) ;
    torch.arange({T}.shape[-1], dtype=F32) ; torch.ones_like({T}) ; torch.full_like({F}, {s}) ;
    torch.tensor([1.5, {s}, 2.0]) ; {F}.new_zeros(3, 4) ; torch.eye(4) ; torch.linspace(0, 1, size) ;
    {T}.shape[0] * {F} ; len({T}) + {F} ; {F}.sum().item() * {F} ; torch.tensor(scalar) * {F} ;
    torch.empty_like({F}).fill_({s}) ; torch.zeros_like({F}).requires_grad_() ;
    torch.func.grad(lambda t: (t * t).sum())({F}) ; torch.ops.fuzz.pair({F})[0] ; torch.ops.fuzz.pair({F})[1] ;
    torch.cond({F}.sum() > 0, lambda t: t.sin(), lambda t: t.cos() + 1, ({1},)) ; torch.empty(0, 3) ;
    {T}.to('cpu', copy=True) ; {F}.double().float() ; torch.as_tensor({T}) ; torch.scalar_tensor({s}) + {F} ;
    torch.is_grad_enabled() * {F} ; F.softmax({F}.detach(), -1) * {1} ; {F}.requires_grad * {1} ;
    torch.tril_indices({k}, 3) ; torch.cartesian_prod({F1}, {F1}) ; torch.compiler.is_compiling() * 0 + {F} ;
    {F}.register_hook(lambda g: None if g is None else g * 2) and {1} ; {T}.numel() * {F} ; max(size, 3) * {F}
""")
PAIRS = _templates("""
    {F}.max({d}) ; {R}.min({d}) ; {F}.sort({d}, stable=True) ; {F}.topk(2, {d}) ; torch.var_mean({F}, {d}) ;
    torch.ops.fuzz.pair({F}) ; {T}.chunk(2, {d}) ; {T}.split([1, {1}.shape[{d}] - 1], {d}) ; {F}.aminmax() ;
    torch.frexp({F}) ; {F}.cummin({d}) ; torch.std_mean({F}) ; torch.linalg.qr({F}) ;
    torch.unique({I}, return_counts=True) ; {T}.tensor_split(2, {d}) ; torch.linalg.slogdet({F}[..., :2, :2]) ;
    F.max_pool2d({F}, 2, return_indices=True) ; {T}.unbind({d})[:2] ;
    torch.native_layer_norm({F}, {1}.shape[-1:], None, None, 1e-5)[:2]
""")
WRITES = _templates("""
    {T}.add_({T~}) ; {N}.mul_({s}) ; {T}.mul_({T~}) ; {F}.copy_({T~}) ; {T}.zero_() ; {F}.fill_({s}) ;
    {T}[{ix}] = {s} ; {F}[{ix}] = {F~} ; {F}[{B=}] = {s} ; {F}[{1} > 0] = {s} ; {F}[{ix}] += 1 ; {N} += {N~} ;
    {F} *= {s} ; {F}.relu_() ; {F}.sigmoid_() ; {F}.clamp_({s}, 2) ; {F}.masked_fill_({B~}, {s}) ;
    {T}.transpose_({d}, {e}) ; {T}.unsqueeze_(0) ; {T}.squeeze_() ; {T}.t_() ; {F}.div_({F~}.abs() + 1) ;
    {F}.scatter_({d}, torch.zeros_like({1}, dtype=I64), {s}) ; {F}.index_add_(0, {I1}.clamp(0, 1)[:1], {1}[:1]) ;
    {T}.index_fill_({d}, {I1}.clamp(0, 1), 1) ; torch.add({F}, 1, out={F=}) ; torch.ops.fuzz.accumulate_({F}, 0.5) ;
    {F}.detach().mul_(0.5) ; {F}.requires_grad_() ; {T}.detach_() ; {T}[0].add_(1) ;
    {T}.view(-1)[0] = 1 ; {F}.t().mul_(2) ; {F}.diagonal().zero_() ;
    {F}.index_put_(({I1}.clamp(0, 1),), {F~}, accumulate=True) ; {R} -= 1 ; {T}.copy_({1}.flip(0)) ;
    {F}.lerp_({F=}, 0.3) ; {B}.logical_not_() ; {T}.swapaxes_({d}, {e}) ; {F}.addcmul_({F~}, {F~}) ;
    {T}.resize_(2, 2) ; {T}.set_({T}) ; torch.sort({F}, stable=True, out=({F=}, {I=})) ; {I} //= 2 ;
    F.relu({F}, inplace=True) ; torch._foreach_mul_([{F}, {F}.clone()], 2.0)
""")
STATE = _templates("""
    self.{b}.add_({s}) ; self.{b}.mul_(0.9).add_({F}.detach().mean()) ; self.{b} = self.{b} + {F~}.detach().mean() ;
    self.{b}.copy_({F}.detach().sum()) ; {x} = self.{b} + {F} ; {x} = self.{p} * {F} ; {x} = {F} - self.{p}.mean() ;
    self.{b}[0] = {F}.detach().mean() ; {x} = self.{p} ; {x} = self.{b}[:1] ; {x} = self.{p}.t() * 2 ;
    self.{b} += 1
""")
BREAKS = _templates("""
    torch._dynamo.graph_break() ; scalar = scalar + {F}.sum().item() * 0.01 ; size = size + 1 ;
    scalar = float(size) * 0.3
""")
INDICES = _templates("""
    0 ; -1 ; 1: ; :-1 ; ::2 ; :1 ; ..., 0 ; ..., 1: ; None ; :, 0 ; :, 1: ; :, None ; 1 ; ..., :2 ; :2 ; [0, 1]
    ; ..., -1: ; 0:0
""")
