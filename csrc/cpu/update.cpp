// Scalars of an update, and the loop over its segments.
#include "zerotrain/update.hpp"

#include <algorithm>
#include <cmath>

#include "zerotrain/float_mode.hpp"
#include "zerotrain/isa.hpp"

namespace zerotrain {

std::size_t width(Float type) {
  switch (type) {
    case Float::none:
      return 0;
    case Float::f32:
      return 4;
    case Float::bf16:
    case Float::f16:
      return 2;
  }
  return 0;
}

std::size_t num_states(Rule rule) { return rule == Rule::adam || rule == Rule::adamw ? 2 : 1; }

namespace {

// The error of rounding `value` to fp32.
float low_part(double value) { return static_cast<float>(value - static_cast<double>(static_cast<float>(value))); }

}  // namespace

Scalars derive(Rule rule, const Hyper& hyper, double grad_scale) {
  const bool corrects = hyper.bias_correction && (rule == Rule::adam || rule == Rule::adamw);
  const double step = static_cast<double>(hyper.step);
  const double bias1 = corrects ? 1.0 - std::pow(hyper.beta1, step) : 1.0;
  const double bias2 = corrects ? 1.0 - std::pow(hyper.beta2, step) : 1.0;
  const double rate = rule == Rule::adagrad ? hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay) : hyper.lr / bias1;
  Scalars s;
  s.grad_scale = static_cast<float>(grad_scale);
  s.grad_scale_low = low_part(grad_scale);
  s.keep = static_cast<float>(1.0 - hyper.lr * hyper.weight_decay);
  s.weight_decay = static_cast<float>(hyper.weight_decay);
  s.beta1 = static_cast<float>(hyper.beta1);
  s.beta2 = static_cast<float>(hyper.beta2);
  s.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  s.one_minus_beta2_low = low_part(1.0 - hyper.beta2);
  s.step_size = static_cast<float>(rate);
  s.step_size_low = low_part(rate);
  s.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2));
  s.eps = static_cast<float>(hyper.eps);
  s.added = hyper.step == 1 ? static_cast<float>(hyper.initial_sum) : 0.0f;
  return s;
}

UpdateTask UpdateTask::part(std::size_t start, std::size_t stop) const {
  UpdateTask moved = *this;
  if (master) moved.master = static_cast<char*>(master) + start * width(master_type);
  if (remainder) moved.remainder += start;
  for (void*& stream : moved.state) {
    if (stream) stream = static_cast<char*>(stream) + start * width(state_type);
  }
  moved.grad = static_cast<const char*>(grad) + start * width(grad_type);
  if (weight) moved.weight = static_cast<char*>(weight) + start * width(weight_type);
  moved.numel = stop - start;
  moved.origin = origin + start;
  return moved;
}

void update_range(const UpdateTask& task, std::size_t start, std::size_t stop, const Isa& isa) {
  const FloatMode mode;
  const std::size_t first = task.origin + start, last = task.origin + stop;
  const Segment* end = task.segments + task.num_segments;
  const Segment* segment = std::lower_bound(
      task.segments, end, first, [](const Segment& one, std::size_t element) { return one.stop <= element; });
  for (; segment != end && segment->start < last; ++segment) {
    const std::size_t low = std::max(segment->start, first) - task.origin;
    const std::size_t high = std::min(segment->stop, last) - task.origin;
    if (low < high) isa.update(task.part(low, high), segment->scalars);
  }
}

}  // namespace zerotrain
