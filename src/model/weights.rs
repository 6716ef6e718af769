//! The linears of a layer as the products see them: fused, with adapters folded in.

use super::config::ModelConfig;
use super::kern::{Exec, Mat, PackedBuf, gemm, gemm_outer};
use super::lora::{LoraLayout, LoraTarget};
use super::params::{Layout, MlpOffsets};

/// A fused linear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Linear {
    Qkv,
    O,
    GateUp,
    Down,
    /// Of a layer with experts, as the next two.
    Router,
    ExpertGateUp(usize),
    ExpertDown(usize),
}

/// One projection inside a fused linear.
struct Part {
    target: LoraTarget,
    first_row: usize,
    rows: usize,
}

impl Linear {
    fn parts(self, c: &ModelConfig) -> Vec<Part> {
        let targets: &[LoraTarget] = match self {
            Linear::Qkv => &[LoraTarget::Q, LoraTarget::K, LoraTarget::V],
            Linear::O => &[LoraTarget::O],
            Linear::GateUp => &[LoraTarget::Gate, LoraTarget::Up],
            Linear::Down => &[LoraTarget::Down],
            // Experts and routers carry no adapters.
            Linear::Router | Linear::ExpertGateUp(_) | Linear::ExpertDown(_) => &[],
        };
        let mut first_row = 0;
        let part = |target: &LoraTarget| {
            let rows = target.shape(c).0;
            first_row += rows;
            Part { target: *target, first_row: first_row - rows, rows }
        };
        targets.iter().map(part).collect()
    }

    /// (rows, columns) of the fused weight.
    pub(super) fn shape(self, c: &ModelConfig) -> (usize, usize) {
        let (experts, inner) = c.moe.as_ref().map_or((0, 0), |m| (m.num_experts, m.moe_intermediate_size));
        match self {
            Linear::Qkv => (c.qkv_dim(), c.hidden_size),
            Linear::O => (c.hidden_size, c.q_dim()),
            Linear::GateUp => (2 * c.intermediate_size, c.hidden_size),
            Linear::Down => (c.hidden_size, c.intermediate_size),
            Linear::Router => (experts, c.hidden_size),
            Linear::ExpertGateUp(_) => (2 * inner, c.hidden_size),
            Linear::ExpertDown(_) => (c.hidden_size, inner),
        }
    }

    /// Its place in the flat parameters.
    pub(super) fn offset(self, layout: &Layout, layer: usize) -> usize {
        let l = &layout.layers[layer];
        match (self, l.mlp) {
            (Linear::Qkv, _) => l.qkv,
            (Linear::O, _) => l.o,
            (Linear::GateUp, MlpOffsets::Dense { gate_up, .. }) => gate_up,
            (Linear::Down, MlpOffsets::Dense { down, .. }) => down,
            (Linear::Router, MlpOffsets::Experts { router, .. }) => router,
            (Linear::ExpertGateUp(e), MlpOffsets::Experts { experts, stride, .. }) => experts + e * stride,
            (Linear::ExpertDown(e), MlpOffsets::Experts { experts, stride, .. }) => {
                experts + e * stride + stride / 3 * 2
            }
            // A linear that the layer does not have: the callers go by the layer's kind.
            _ => layout.total(),
        }
    }
}

/// Base weights and, if any, the adapters on them.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    pub config: &'a ModelConfig,
    pub layout: &'a Layout,
    pub base: &'a [f32],
    pub lora: Option<(&'a LoraLayout, &'a [f32])>,
}

/// Buffers for folding adapters in and for their gradients.
#[derive(Debug, Default)]
pub(super) struct FoldBuffers {
    weight: Vec<f32>,
    scaled: Vec<f32>,
    packed: PackedBuf,
    inner: Vec<f32>,
}

impl<'a> Weights<'a> {
    /// A slice of the base parameters.
    pub(super) fn slice(&self, offset: usize, len: usize) -> &'a [f32] {
        &self.base[offset..offset + len]
    }

    /// `W + (alpha / rank) B A` of one fused linear, row-major `[out, in]`.
    pub(super) fn effective<'b>(
        &self,
        exec: Exec,
        layer: usize,
        linear: Linear,
        buffers: &'b mut FoldBuffers,
    ) -> &'b [f32]
    where
        'a: 'b,
    {
        let (rows, cols) = linear.shape(self.config);
        let base = self.slice(linear.offset(self.layout, layer), rows * cols);
        let Some((lora, values)) = self.lora else { return base };
        let parts = linear.parts(self.config);
        if parts.iter().all(|p| lora.adapter(layer, p.target).is_none()) {
            return base;
        }
        let rank = lora.config().rank;
        let FoldBuffers { weight, scaled, packed, .. } = buffers;
        weight.clear();
        weight.extend_from_slice(base);
        for part in parts {
            let Some(at) = lora.adapter(layer, part.target) else { continue };
            scaled.clear();
            let scale = lora.config().scale();
            scaled.extend(values[at.b..at.b + part.rows * rank].iter().map(|b| b * scale));
            packed.pack(exec, rank, cols, Mat::rows(&values[at.a..at.a + rank * cols], cols));
            let out = &mut weight[part.first_row * cols..(part.first_row + part.rows) * cols];
            gemm(exec, part.rows, Mat::rows(scaled, rank), packed.view(), out, cols, true);
        }
        weight
    }

    /// Adds the gradient of one fused linear `y = x W^T`, from `x [n, in]` and `dy [n, out]`: to the
    /// adapters' gradient when there are adapters, else to the weight's.
    pub(super) fn add_gradient(
        &self,
        exec: Exec,
        layer: usize,
        linear: Linear,
        (n, x, dy): (usize, &[f32], &[f32]),
        grad: &mut [f32],
        buffers: &mut FoldBuffers,
    ) {
        let (rows, cols) = linear.shape(self.config);
        let Some((lora, values)) = self.lora else {
            let at = linear.offset(self.layout, layer);
            gemm_outer(exec, n, (rows, dy, rows), (cols, x, cols), &mut grad[at..at + rows * cols]);
            return;
        };
        let (rank, scale) = (lora.config().rank, lora.config().scale());
        let FoldBuffers { packed, inner, .. } = buffers;
        inner.resize(inner.len().max(n * rank), 0.0);
        for part in linear.parts(self.config) {
            let Some(at) = lora.adapter(layer, part.target) else { continue };
            let (a, b) = (at.a..at.a + rank * cols, at.b..at.b + part.rows * rank);
            let dy = &dy[part.first_row..];
            // y = s (x A^T) B^T: dB = s dy^T (x A^T), dA = s (dy B)^T x.
            packed.pack(exec, cols, rank, Mat::transposed(&values[a.clone()], cols));
            gemm(exec, n, Mat::rows(x, cols), packed.view(), inner, rank, false);
            inner[..n * rank].iter_mut().for_each(|v| *v *= scale);
            gemm_outer(exec, n, (part.rows, dy, rows), (rank, inner, rank), &mut grad[b.clone()]);
            packed.pack(exec, part.rows, rank, Mat::rows(&values[b], rank));
            gemm(exec, n, Mat::strided(dy, rows), packed.view(), inner, rank, false);
            inner[..n * rank].iter_mut().for_each(|v| *v *= scale);
            gemm_outer(exec, n, (rank, inner, rank), (cols, x, cols), &mut grad[a]);
        }
    }
}
