// Runs every update with every instruction set of the target machine, and prints a hash of everything that was
// written. Compiled and run by test_neon.py for two processors.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "zerotrain/isa.hpp"

using namespace zerotrain;
using Bytes = std::vector<unsigned char>;

namespace {

constexpr std::size_t kNumel = 4003;  // no multiple of a vector

struct Case {
  Rule rule;
  Float grad, weight;
  bool has_remainder, is_wild;
  bool bf16_master = false, bf16_states = false;
};

float* floats(Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

// Every bit pattern if wild, otherwise numbers as in training; the same on every machine.
std::vector<Bytes> make_arrays(const Case& one) {
  std::mt19937_64 random(7);
  const std::size_t widths[] = {4, 4, 4, 2, width(one.grad), width(one.weight)};
  std::vector<Bytes> arrays;
  for (std::size_t bytes : widths) {
    arrays.emplace_back(bytes * kNumel);
    for (unsigned char& byte : arrays.back()) byte = static_cast<unsigned char>(random());
  }
  for (std::size_t i = 0; i < kNumel; ++i) {
    if (!one.is_wild) {
      for (int which = 0; which < 3; ++which) {
        const float scale = which == 0 ? 1e-6f : which == 1 ? 1e-8f : 1e-9f;
        floats(arrays[which])[i] = static_cast<float>(static_cast<double>(random() % 2000001) - 1e6) * scale;
      }
    }
    arrays[2][4 * i + 3] &= 0x7f;  // second moments are not negative
  }
  return arrays;
}

void run(const Case& one, std::vector<Bytes>& arrays, const Isa& isa) {
  const Hyper hyper{1e-3, 0.9, 0.95, 1e-8, 0.1, 3};
  const Segment segment{0, kNumel, derive(one.rule, hyper, 0.37)};
  UpdateTask task;
  task.rule = one.rule;
  if (one.has_remainder) {
    task.remainder = reinterpret_cast<std::int16_t*>(arrays[3].data());
  } else {
    task.master = floats(arrays[0]);
  }
  if (one.bf16_master) task.master_type = Float::bf16;
  if (one.bf16_states) task.state_type = Float::bf16;
  task.state[0] = floats(arrays[1]);
  if (num_states(one.rule) == 2) task.state[1] = floats(arrays[2]);
  task.grad = arrays[4].data();
  task.grad_type = one.grad;
  if (one.weight != Float::none) task.weight = arrays[5].data();
  task.weight_type = one.weight;
  task.segments = &segment;
  task.num_segments = 1;
  task.numel = kNumel;
  update_range(task, 0, kNumel, isa);
}

}  // namespace

int main() {
  std::size_t count = 0;
  const Isa* isas = available_isas(count);
  std::uint64_t hash = 1469598103934665603u;  // FNV-1a
  std::size_t cases = 0, different = 0;
  for (Rule rule : {Rule::adam, Rule::adamw, Rule::adagrad, Rule::lion}) {
    for (Float grad : {Float::f32, Float::bf16, Float::f16}) {
      for (Float weight : {Float::none, Float::f32, Float::bf16, Float::f16}) {
        const int kinds = weight == Float::bf16 ? 4 : weight == Float::none ? 6 : 2;
        for (int kind = 0; kind < kinds; ++kind) {
          Case one{rule, grad, weight, weight == Float::bf16 && kind >= 2, kind % 2 == 1};
          one.bf16_master = weight == Float::none && kind >= 2;
          one.bf16_states = weight == Float::none && kind >= 4;
          std::vector<Bytes> first = make_arrays(one);
          run(one, first, isas[0]);
          for (const Bytes& bytes : first) {
            for (unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
          }
          for (std::size_t other = 1; other < count; ++other) {
            std::vector<Bytes> again = make_arrays(one);
            run(one, again, isas[other]);
            different += again != first;
          }
          ++cases;
        }
      }
    }
  }
  std::printf("%s %zu %zu %016llx\n", isas[0].name, cases, different, static_cast<unsigned long long>(hash));
  return 0;
}
