// The policy-gradient loss over logits, f32. The arithmetic repeats src/learner/loss/reference.rs and
// kernels/grpo/reference.rs line by line; change them together. Correct first; a later version makes it fast.
//
// out = [HEADER scalars | logp n | entropy n | lse n | dlogp n | dentropy n]
// Reductions run over fixed trees, so results do not depend on scheduling.

#define HEADER 8
#define LIMIT 20.0f

enum { GRPO = 0, DAPO, DR_GRPO, BNPO, GSPO, CISPO, GPG };
enum { K1 = 0, K2, K3 };
enum { TIS = 1, MIS = 2 };

// Same fields in the same order as Options in cuda.rs; every field is 4 bytes.
struct Options {
  int kind, kl;
  int correction, sequence_level;
  int has_old, has_ref, has_sampler, has_delta, has_dual, has_min;
  float low, high, cispo_bound, delta, dual, beta;
  float correction_max, correction_min;
  float entropy_coef;
};

__device__ __forceinline__ float clamped_exp(float x, bool* free) {
  // Comparisons are false for NaN, which passes on and is seen as non-finite later.
  *free = !(x > LIMIT) && !(x < -LIMIT);
  return expf(x > LIMIT ? LIMIT : (x < -LIMIT ? -LIMIT : x));
}

// Sum over the block in a fixed order; every thread gets it. blockDim.x is a power of two <= 256.
__device__ double block_sum(double x) {
  __shared__ double s[256];
  s[threadIdx.x] = x;
  __syncthreads();
  for (int half = blockDim.x >> 1; half; half >>= 1) {
    if (threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];
    __syncthreads();
  }
  double r = s[0];
  __syncthreads();
  return r;
}

__device__ float block_max(float x) {
  __shared__ float s[256];
  s[threadIdx.x] = x;
  __syncthreads();
  for (int half = blockDim.x >> 1; half; half >>= 1) {
    if (threadIdx.x < half) s[threadIdx.x] = fmaxf(s[threadIdx.x], s[threadIdx.x + half]);
    __syncthreads();
  }
  float r = s[0];
  __syncthreads();
  return r;
}

// One block per row: log-prob of the target, entropy, log-sum-exp.
extern "C" __global__ void grpo_rows(const float* __restrict__ logits, const unsigned* __restrict__ targets,
                                     const unsigned char* __restrict__ mask, float* __restrict__ out, int n, int v,
                                     float inverse_temperature) {
  int i = blockIdx.x;
  float *logp = out + HEADER, *entropy = logp + n, *lse = entropy + n;
  if (!mask[i]) {  // the same for the whole block
    if (!threadIdx.x) logp[i] = entropy[i] = lse[i] = 0.0f;
    return;
  }
  const float* x = logits + (size_t)i * v;
  float top = x[targets[i]];
  for (int j = threadIdx.x; j < v; j += blockDim.x) top = x[j] > top ? x[j] : top;
  top = block_max(top);
  double sum = 0.0, weighted = 0.0;
  for (int j = threadIdx.x; j < v; j += blockDim.x) {
    float d = (x[j] - top) * inverse_temperature;
    float e = expf(d);
    sum += e;
    if (e != 0.0f) weighted += e * d;  // an impossible token has d = -inf
  }
  sum = block_sum(sum);
  weighted = block_sum(weighted);
  if (!threadIdx.x) {
    double log_sum = log(sum);
    logp[i] = (x[targets[i]] - top) * inverse_temperature - (float)log_sum;
    entropy[i] = (float)(log_sum - weighted / sum);
    lse[i] = top * inverse_temperature + (float)log_sum;
  }
}

struct Surrogate {
  float value, slope;
  bool clipped, capped;
};

__device__ Surrogate clipped_surrogate(const Options& o, float log_ratio, float advantage) {
  bool free;
  float ratio = clamped_exp(log_ratio, &free);
  bool over_delta = o.has_delta && ratio > o.delta;
  float bounded = over_delta ? o.delta : ratio;
  bool inside = ratio >= o.low && ratio <= o.high;
  float clipped_ratio = ratio < o.low ? o.low : (ratio > o.high ? o.high : ratio);
  float plain = bounded * advantage, clip = clipped_ratio * advantage;
  float full = free ? -(ratio * advantage) : 0.0f;
  Surrogate s;
  if (clip < plain) {
    s.value = -clip;
    s.slope = inside ? full : 0.0f;
  } else {
    s.value = -plain;
    s.slope = over_delta ? 0.0f : full;
  }
  s.capped = over_delta && advantage < 0.0f;
  if (o.has_dual && advantage < 0.0f && s.value > -(o.dual * advantage)) {
    s.value = -(o.dual * advantage);
    s.slope = 0.0f;
    s.capped = true;
  }
  s.clipped = (ratio < o.low && advantage < 0.0f) || (ratio > o.high && advantage > 0.0f);
  return s;
}

__device__ float correction_weight(const Options& o, float log_ratio) {
  bool free;
  float w = clamped_exp(log_ratio, &free);
  if (o.correction == MIS) return (w > o.correction_max || (o.has_min && w < o.correction_min)) ? 0.0f : w;
  if (w > o.correction_max) return o.correction_max;
  return (o.has_min && w < o.correction_min) ? o.correction_min : w;
}

// One block per sequence: dL/dlogp and dL/dentropy of its tokens, partial sums of the header.
extern "C" __global__ void grpo_sequences(float* __restrict__ out, const unsigned char* __restrict__ mask,
                                          const unsigned* __restrict__ offsets, const float* __restrict__ advantages,
                                          const double* __restrict__ weights, const float* __restrict__ old_logp,
                                          const float* __restrict__ ref_logp, const float* __restrict__ sampler_logp,
                                          double* __restrict__ partial, int n, Options o) {
  int s = blockIdx.x;
  unsigned from = offsets[s], to = offsets[s + 1];
  const float *logp = out + HEADER, *entropy = logp + n;
  float *dlogp = out + HEADER + 3 * (size_t)n, *dentropy = dlogp + n;
  float advantage = advantages[s], weight = (float)weights[s];

  double count = 0.0, log_ratios = 0.0, sampler_ratios = 0.0;
  for (unsigned t = from + threadIdx.x; t < to; t += blockDim.x)
    if (mask[t]) {
      float old = o.has_old ? old_logp[t] : logp[t];
      count += 1.0;
      log_ratios += logp[t] - old;
      if (o.has_sampler) sampler_ratios += old - sampler_logp[t];
    }
  count = block_sum(count);
  log_ratios = block_sum(log_ratios);
  sampler_ratios = block_sum(sampler_ratios);

  float sequence_weight = o.correction && o.sequence_level ? correction_weight(o, (float)sampler_ratios) : 1.0f;
  Surrogate whole;
  if (o.kind == GSPO) {
    double w = 0.0;
    for (unsigned t = from + threadIdx.x; t < to; t += blockDim.x)
      if (mask[t]) {
        float old = o.has_old ? old_logp[t] : logp[t];
        w += o.correction && !o.sequence_level ? correction_weight(o, old - sampler_logp[t]) : sequence_weight;
      }
    w = block_sum(w);
    float c = count > 0.0 ? (float)count : 1.0f;
    whole = clipped_surrogate(o, (float)(log_ratios / c), advantage);
    whole.slope *= (float)(w / c);
  }

  double policy = 0.0, kl_sum = 0.0, entropy_sum = 0.0, clipped = 0.0, capped = 0.0, bad = 0.0;
  for (unsigned t = from + threadIdx.x; t < to; t += blockDim.x) {
    dlogp[t] = dentropy[t] = 0.0f;
    if (!mask[t]) continue;
    float lp = logp[t], old = o.has_old ? old_logp[t] : lp;
    float w = o.correction && !o.sequence_level ? correction_weight(o, old - sampler_logp[t]) : sequence_weight;
    float value, slope;
    bool is_clipped = false, is_capped = false;
    if (o.kind == GSPO) {
      value = w * whole.value;
      slope = whole.slope;
      is_clipped = whole.clipped;
      is_capped = whole.capped;
    } else if (o.kind == CISPO) {
      bool free;
      float ratio = clamped_exp(lp - old, &free);
      bool over = ratio > o.cispo_bound;
      slope = -((over ? o.cispo_bound : ratio) * advantage);
      value = w * (slope * lp);
      slope = w * slope;
      is_clipped = over && advantage != 0.0f;
    } else if (o.kind == GPG) {
      value = w * -(advantage * lp);
      slope = w * -advantage;
    } else {
      Surrogate c = clipped_surrogate(o, lp - old, advantage);
      value = w * c.value;
      slope = w * c.slope;
      is_clipped = c.clipped;
      is_capped = c.capped;
    }
    policy += value;
    clipped += is_clipped;
    capped += is_capped;
    if (o.has_ref) {
      float d = ref_logp[t] - lp, kl_value, kl_slope;
      if (o.kl == K1) {
        kl_value = -d;
        kl_slope = 1.0f;
      } else if (o.kl == K2) {
        kl_value = 0.5f * d * d;
        kl_slope = -d;
      } else {
        bool free = !(d > LIMIT) && !(d < -LIMIT);
        float held = d > LIMIT ? LIMIT : (d < -LIMIT ? -LIMIT : d);
        float rise = expm1f(held);
        kl_value = rise - held;
        kl_slope = free ? -rise : 0.0f;
      }
      kl_sum += kl_value;
      if (o.beta != 0.0f) slope += o.beta * kl_slope;
    }
    dlogp[t] = weight * slope;
    bad += !isfinite(dlogp[t]);
    entropy_sum += entropy[t];
    if (o.entropy_coef != 0.0f) dentropy[t] = (float)(-(double)o.entropy_coef * weights[s]);
  }
  double sums[7] = {policy, kl_sum, entropy_sum, clipped, capped, count, bad};
  for (int k = 0; k < 7; k++) {
    double x = k == 5 ? count : block_sum(sums[k]);
    if (!threadIdx.x) partial[(size_t)s * 7 + k] = x;
  }
}

// One block: the header, sequences added in order.
extern "C" __global__ void grpo_total(const double* __restrict__ partial, const double* __restrict__ weights,
                                      float* __restrict__ out, int sequences, float beta, float entropy_coef) {
  if (threadIdx.x || blockIdx.x) return;
  double loss = 0.0, policy = 0.0, sums[7] = {0, 0, 0, 0, 0, 0, 0};
  for (int s = 0; s < sequences; s++) {
    const double* p = partial + (size_t)s * 7;
    if (p[5] > 0.0) {
      double own = weights[s] * p[0];
      policy += own;
      if (beta != 0.0f) own += weights[s] * (double)beta * p[1];
      if (entropy_coef != 0.0f) own -= weights[s] * (double)entropy_coef * p[2];
      loss += own;
    }
    for (int k = 0; k < 7; k++) sums[k] += p[k];
  }
  out[0] = (float)loss;
  out[1] = (float)policy;
  out[2] = (float)sums[1];
  out[3] = (float)sums[2];
  out[4] = (float)sums[3];
  out[5] = (float)sums[4];
  out[6] = (float)sums[5];
  out[7] = sums[6] > 0.0 || !isfinite(loss) ? 1.0f : 0.0f;
}

// One block per row: dL/dlogits. `logits` and `dlogits` may be the same memory, hence no __restrict__.
extern "C" __global__ void grpo_backward(const float* logits, float* dlogits, const float* __restrict__ out,
                                         const float* __restrict__ gradient, const unsigned* __restrict__ targets,
                                         const unsigned char* __restrict__ mask, int n, int v,
                                         float inverse_temperature) {
  int i = blockIdx.x;
  const float* x = logits + (size_t)i * v;
  float* dx = dlogits + (size_t)i * v;
  if (!mask[i]) {
    for (int j = threadIdx.x; j < v; j += blockDim.x) dx[j] = 0.0f;
    return;
  }
  const float *entropy = out + HEADER + n, *lse = entropy + n, *dlogp = lse + n, *dentropy = dlogp + n;
  float g = gradient[0] * dlogp[i], gh = gradient[0] * dentropy[i], h = entropy[i], l = lse[i];
  int target = targets[i];
  for (int j = threadIdx.x; j < v; j += blockDim.x) {
    float log_p = x[j] * inverse_temperature - l;
    float p = expf(log_p);
    float through_entropy = p == 0.0f ? 0.0f : gh * p * (log_p + h);
    float d = -inverse_temperature * (g * p + through_entropy);
    dx[j] = j == target ? d + inverse_temperature * g : d;
  }
}
