// The speed at which this machine reads and writes the arrays of an optimizer step with hardly any arithmetic;
// compiled and called by bench_cpu_adam.py. It shares no code with the kernels that are compared with it.
#include <immintrin.h>

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kLine = 64;

struct Streams {
  char* const* both;  // read and written
  const std::size_t* both_bytes;
  std::size_t num_both;
  const char* read;
  std::size_t read_bytes;
  char* written;
  std::size_t written_bytes;  // per unit of work, as are the others: bytes of one element
  bool past_caches;
};

// Elements [start, stop), in groups of 32 elements, so that every stream moves by whole cache lines.
void pass(const Streams& s, std::size_t start, std::size_t stop) {
  const __m512i one = _mm512_set1_epi64(1);
  for (std::size_t i = start; i < stop; i += 32) {
    __m512i mixed = one;
    for (std::size_t at = 0; at < 32 * s.read_bytes; at += kLine) {
      mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(s.read + i * s.read_bytes + at));
    }
    for (std::size_t stream = 0; stream < s.num_both; ++stream) {
      const std::size_t bytes = s.both_bytes[stream];
      for (std::size_t at = 0; at < 32 * bytes; at += kLine) {
        char* place = s.both[stream] + i * bytes + at;
        _mm512_storeu_si512(place, _mm512_xor_si512(mixed, _mm512_loadu_si512(place)));
      }
    }
    for (std::size_t at = 0; at < 32 * s.written_bytes; at += kLine) {
      auto* place = reinterpret_cast<__m512i*>(s.written + i * s.written_bytes + at);
      s.past_caches ? _mm512_stream_si512(place, mixed) : _mm512_storeu_si512(place, mixed);
    }
  }
  _mm_sfence();
}

}  // namespace

// One pass over `numel` elements (a multiple of 32; `written` at the start of a cache line) on `threads` threads,
// which take `block` elements at a time, or halves of the whole with 0.
extern "C" void memory_roof(char* const* both, const std::size_t* both_bytes, std::size_t num_both, const char* read,
                            std::size_t read_bytes, char* written, std::size_t written_bytes, bool past_caches,
                            std::size_t numel, std::size_t threads, std::size_t block) {
  const Streams streams{both, both_bytes, num_both, read, read_bytes, written, written_bytes, past_caches};
  if (block == 0) block = (numel / threads + 31) / 32 * 32;
  std::atomic<std::size_t> next{0};
  auto take = [&] {
    for (std::size_t start = next.fetch_add(block); start < numel; start = next.fetch_add(block)) {
      pass(streams, start, start + block < numel ? start + block : numel);
    }
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < threads; ++i) others.emplace_back(take);
  take();
  for (auto& other : others) other.join();
}
