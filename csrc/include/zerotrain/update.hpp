// One optimizer step over a run of elements, in one pass over memory: gradient in (fp32, bf16 or fp16), loss
// scale and clip factor folded in, state (fp32 or bf16) updated in place, weight out (fp32, bf16, fp16 or none).
//
// The kernels are one source, compiled for several instruction sets. Every operation is either exactly rounded by
// IEEE 754 (+ - * / sqrt) or an explicit fused multiply-add, in one order and element by element. Every NaN that is
// written is the same quiet one. The processor's rounding and denormal modes are set for the time of a call.
// Instruction set, thread count and any division of a run therefore give the same bits.
//
// Called by update_bindings.cpp (resident states) and by the fused open-update-seal (states in the spill).
#pragma once

#include <cstddef>
#include <cstdint>

namespace zerotrain {

struct Isa;

// adam: L2 in the gradient (https://arxiv.org/abs/1412.6980). adamw: decoupled decay
// (https://arxiv.org/abs/1711.05101). adagrad: https://jmlr.org/papers/v12/duchi11a.html.
// lion: https://arxiv.org/abs/2302.06675.
enum class Rule { adam, adamw, adagrad, lion };
enum class Float { none, f32, bf16, f16 };

std::size_t width(Float type);      // bytes of an element; 0 for none
std::size_t num_states(Rule rule);  // streams beside the master: 2, 2, 1, 1

// Hyperparameters of one segment, as the user gives them.
struct Hyper {
  double lr = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, weight_decay = 0.0;
  std::int64_t step = 1;  // counts from 1
  bool bias_correction = true;
  double lr_decay = 0.0;     // adagrad: rate = lr / (1 + (step - 1) * lr_decay)
  double initial_sum = 0.0;  // adagrad: initial value of the sum of squares, added in step 1
};

// Scalars for the kernels: derived from Hyper in double precision and rounded once.
struct Scalars {
  float grad_scale;      // clip factor divided by the loss scale; 1 when neither applies
  float grad_scale_low;  // as below
  float keep;          // 1 - lr * weight_decay (adamw, lion)
  float weight_decay;  // added to the gradient instead (adam, adagrad)
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float one_minus_beta2_low;  // the rounding error of one_minus_beta2
  float step_size;       // lr / (1 - beta1^t); the rate of adagrad; lr of lion
  float step_size_low;   // as above
  float inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float added;  // initial_sum in adagrad's first step, else 0
};

Scalars derive(Rule rule, const Hyper& hyper, double grad_scale);

// Elements [start, stop) with the same scalars.
struct Segment {
  std::size_t start, stop;
  Scalars scalars;
};

// A step over `numel` elements. The master is either `master` (fp32, or bf16 without another weight), or `weight`
// (bf16) and `remainder` together: fp32 bits = (weight << 16) + remainder, the weight rounded half up. States are fp32,
// or bf16 beside a bf16 master; all arithmetic is fp32, and what is stored in bf16 is rounded to nearest, ties to even.
// Elements outside of all segments stay unchanged. The task owns no memory; a copy is cheap.
struct UpdateTask {
  Rule rule = Rule::adamw;
  void* master = nullptr;
  Float master_type = Float::f32;
  std::int16_t* remainder = nullptr;
  void* state[2] = {nullptr, nullptr};  // adam: first and second moment; adagrad: sum; lion: momentum
  Float state_type = Float::f32;
  const void* grad = nullptr;
  Float grad_type = Float::f32;
  void* weight = nullptr;
  Float weight_type = Float::none;
  bool streams_weight = false;          // write the weights past the caches; only speed depends on it
  const Segment* segments = nullptr;    // ascending, without overlap
  std::size_t num_segments = 0;
  std::size_t numel = 0;
  std::size_t origin = 0;  // element 0 of the arrays is this element of the segments' coordinates

  // The task of elements [start, stop) of the arrays: every pointer that is set, and `origin`, are advanced.
  UpdateTask part(std::size_t start, std::size_t stop) const;
};

// Updates elements [start, stop) of the arrays (not of the segments). It may run on any thread, takes no lock and
// allocates nothing; different ranges may run at the same time.
void update_range(const UpdateTask& task, std::size_t start, std::size_t stop, const Isa& isa);

// The entry of an instruction set's kernels: the whole task with one set of scalars.
using UpdateKernel = void (*)(const UpdateTask& task, const Scalars& scalars);

void update_baseline(const UpdateTask& task, const Scalars& scalars);
void update_avx2(const UpdateTask& task, const Scalars& scalars);
void update_avx512(const UpdateTask& task, const Scalars& scalars);
void update_neon(const UpdateTask& task, const Scalars& scalars);

}  // namespace zerotrain
