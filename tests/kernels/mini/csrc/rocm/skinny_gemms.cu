// A product of a matrix and a vector. The same row function runs on the host and on the device, so
// that a test can call what was compiled from this very file on a machine without one.
#include <cuda_runtime.h>
#include "core/scale.h"
#include "core/shape.cuh"
#include "rocm/ops.h"

__host__ __device__ static float row_product(const float* a, const float* b, int row, int k) {
  float sum = 0.0f;
  for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i];
  return sum * MINI_SCALE;
}

__global__ void LLGemm1_kernel(const float* a, const float* b, float* out, int m, int k,
                               int rows_per_block) {
  int row = blockIdx.x * rows_per_block + threadIdx.x;
  if (threadIdx.x < rows_per_block && row < m) out[row] = row_product(a, b, row, k);
}

void llmm1_on_host(const float* a, const float* b, float* out, int m, int k) {
  for (int row = 0; row < m; ++row) out[row] = row_product(a, b, row, k);
}

int llmm1_on_device(const float* a, const float* b, float* out, int m, int k, int rows_per_block,
                    void* stream) {
  cudaStream_t queue = static_cast<cudaStream_t>(stream);
  LLGemm1_kernel<<<mini_grid(m, rows_per_block), MINI_BLOCK, 0, queue>>>(a, b, out, m, k,
                                                                        rows_per_block);
  return static_cast<int>(cudaGetLastError());
}
