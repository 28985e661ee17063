// One row of activations times a weight matrix, a wavefront for every output.
//
// Plain pointers and a stream, so that it compiles without torch's device headers; the binding
// that checks shapes stands elsewhere.

#include <cuda_runtime.h>

namespace dcu {

constexpr int kWave = 64;

__global__ void llmm1_kernel(const float* __restrict__ weight, const float* __restrict__ x,
                             float* __restrict__ out, int rows, int columns) {
  const int row = blockIdx.x * (blockDim.x / kWave) + threadIdx.x / kWave;
  const int lane = threadIdx.x % kWave;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int column = lane; column < columns; column += kWave) {
    sum += weight[static_cast<long long>(row) * columns + column] * x[column];
  }
  for (int step = kWave / 2; step > 0; step /= 2) {
    sum += __shfl_down(sum, step);
  }
  if (lane == 0) out[row] = sum;
}

void llmm1(const float* weight, const float* x, float* out, int rows, int columns,
           cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int blocks = (rows + kThreads / kWave - 1) / (kThreads / kWave);
  llmm1_kernel<<<blocks, kThreads, 0, stream>>>(weight, x, out, rows, columns);
}

}  // namespace dcu
