// What the two .cu files give to torch_bindings.cpp: plain pointers, no torch type.
#pragma once

void llmm1_on_host(const float* a, const float* b, float* out, int m, int k);
int llmm1_on_device(const float* a, const float* b, float* out, int m, int k, int rows_per_block,
                    void* stream);
void decay_on_host(const float* in, float* out, int n);
int decay_on_device(const float* in, float* out, int n, void* stream);
