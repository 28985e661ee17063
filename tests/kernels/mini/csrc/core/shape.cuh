// How many outputs one block works on.
#pragma once
#include <cuda_runtime.h>

constexpr int MINI_BLOCK = 64;

static inline dim3 mini_grid(int rows, int rows_per_block) {
  return dim3((rows + rows_per_block - 1) / rows_per_block);
}
