// Rotary positions of heads [rows, heads, width], as eager.py writes them; `back` turns the other way.

namespace {

template <typename T, typename Raw>
void turn(const Raw* x, const Raw* cos, const Raw* sin, Raw* out, int64_t rows, int64_t heads, int64_t width, T sign,
          int64_t threads) {
  const int64_t half = width / 2;
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = (row * heads + head) * width, angle = row * width;
#pragma omp simd
      for (int64_t j = 0; j < half; ++j) {
        const T a = widen(x[at + j]), b = widen(x[at + half + j]), c = widen(cos[angle + j]);
        const T s = sign * widen(sin[angle + j]);
        narrow(a * c - b * s, out + at + j);
        narrow(b * c + a * s, out + at + half + j);
      }
    }
}

}  // namespace

#define FUNCTIONS(NAME, T, RAW)                                                                                       \
  extern "C" void turn_##NAME(const RAW* x, const RAW* cos, const RAW* sin, RAW* out, int64_t rows, int64_t heads,   \
                              int64_t width, double sign, int64_t threads) {                                          \
    turn<T>(x, cos, sin, out, rows, heads, width, T(sign), threads);                                                 \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
