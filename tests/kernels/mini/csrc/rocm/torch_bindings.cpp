// Registers the two operators, and makes `import vllm._rocm_C` possible.
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "rocm/ops.h"

namespace {

at::Tensor llmm1(const at::Tensor& a, const at::Tensor& b, int64_t rows_per_block) {
  TORCH_CHECK(a.dim() == 2 && b.numel() == a.size(1), "LLMM1 takes (m, k) and (1, k)");
  auto left = a.contiguous(), right = b.contiguous();
  auto out = at::empty({1, left.size(0)}, left.options());
  llmm1_on_host(left.const_data_ptr<float>(), right.const_data_ptr<float>(),
                out.mutable_data_ptr<float>(), left.size(0), left.size(1));
  return out;
}

at::Tensor decay(const at::Tensor& in) {
  auto whole = in.contiguous();
  auto out = at::empty(whole.sizes(), whole.options());
  decay_on_host(whole.const_data_ptr<float>(), out.mutable_data_ptr<float>(), whole.numel());
  return out;
}

}  // namespace

TORCH_LIBRARY(_rocm_C, ops) {
  ops.def("LLMM1(Tensor in_a, Tensor in_b, int rows_per_block) -> Tensor");
  ops.impl("LLMM1", c10::kCPU, &llmm1);
  ops.def("paged_decay(Tensor values) -> Tensor");
  ops.impl("paged_decay", c10::kCPU, &decay);
}

PyMODINIT_FUNC PyInit__rocm_C(void) {
  static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rocm_C", nullptr, 0, nullptr};
  return PyModule_Create(&module);
}
