// Runs grpo.cu on the CPU with one thread per block: reads a case from stdin, writes the results to stdout.
// Used by source_tests.rs, so that the arithmetic of the kernels is checked where there is no card.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <math.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __syncthreads()
struct Index {
  unsigned x;
};
static Index threadIdx{0}, blockIdx{0}, blockDim{1};

#include "grpo.cu"

template <class T> static std::vector<T> take(size_t n) {
  std::vector<T> v(n);
  if (n && fread(v.data(), sizeof(T), n, stdin) != n) exit(3);
  return v;
}

int main() {
  auto size = take<int>(3);
  int n = size[0], v = size[1], sequences = size[2];
  Options o = take<Options>(1)[0];
  float inverse_temperature = take<float>(1)[0];
  auto logits = take<float>((size_t)n * v);
  auto targets = take<unsigned>(n);
  auto mask = take<unsigned char>(n);
  auto offsets = take<unsigned>(sequences + 1);
  auto advantages = take<float>(sequences);
  auto weights = take<double>(sequences);
  auto old = take<float>(n), reference = take<float>(n), sampler = take<float>(n), gradient = take<float>(1);
  std::vector<float> out(HEADER + 5 * n), dlogits(logits.size());
  std::vector<double> partial(7 * sequences);
  for (int i = 0; i < n; i++) {
    blockIdx.x = i;
    grpo_rows(logits.data(), targets.data(), mask.data(), out.data(), n, v, inverse_temperature);
  }
  for (int s = 0; s < sequences; s++) {
    blockIdx.x = s;
    grpo_sequences(out.data(), mask.data(), offsets.data(), advantages.data(), weights.data(), old.data(),
                   reference.data(), sampler.data(), partial.data(), n, o);
  }
  blockIdx.x = 0;
  grpo_total(partial.data(), weights.data(), out.data(), sequences, o.beta, o.entropy_coef);
  for (int i = 0; i < n; i++) {
    blockIdx.x = i;
    grpo_backward(logits.data(), dlogits.data(), out.data(), gradient.data(), targets.data(), mask.data(), n, v,
                  inverse_temperature);
  }
  fwrite(out.data(), sizeof(float), out.size(), stdout);
  fwrite(dlogits.data(), sizeof(float), dlogits.size(), stdout);
  return 0;
}
