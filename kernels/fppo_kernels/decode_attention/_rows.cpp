// Attention of one token per row over its cache, as eager.py writes it.

namespace {

constexpr int64_t ANY = 0;  // a number of vectors that is not known when this is compiled

// The products of a query of `width` numbers with `seen` keys, and in the room behind them any numbers. `PARTS` is
// the number of vectors of the width, or ANY.
template <int64_t PARTS, typename T, typename Raw>
void multiply(const Raw* query, int64_t groups, const Raw* keys, int64_t seen, int64_t room, int64_t width, T* scores) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  for (int64_t c = 0; c < room; c += LANES)  // keys of a few columns are read by all queries of the group
    for (int64_t g = 0; g < groups; ++g) {
      const Raw* q = query + g * width;
      T* out = scores + g * room + c;
      if constexpr (PARTS == ANY) {
        for (int64_t i = 0; i < LANES && c + i < seen; ++i) {
          T sum = 0;
#pragma omp simd reduction(+ : sum)
          for (int64_t d = 0; d < width; ++d) sum += widen(q[d]) * widen(keys[(c + i) * width + d]);
          out[i] = sum;
        }
      } else {
        vector whole[PARTS], sums[LANES];
        for (int64_t j = 0; j < PARTS; ++j) whole[j] = load<T>(q + j * LANES);
        for (int64_t i = 0; i < LANES; ++i) {
          const Raw* key = keys + (c + i < seen ? c + i : seen - 1) * width;
          sums[i] = whole[0] * load<T>(key);
          for (int64_t j = 1; j < PARTS; ++j) sums[i] += whole[j] * load<T>(key + j * LANES);
        }
        store(across(sums), out);
      }
    }
}

// scores [room] to exp(score) / (sum of all + exp(sink)), and 0 behind the `seen` ones.
template <typename T, typename Raw>
void normalise(T* scores, int64_t seen, int64_t room, const Raw* bias, const T* sink, T scale, T softcap) {
  for (int64_t c = 0; c < room; c += Vector<T>::lanes) store(load<T>(scores + c) * scale, scores + c);
  if (softcap != T(0))
    for (int64_t c = 0; c < seen; ++c) scores[c] = softcap * std::tanh(scores[c] / softcap);
  if (bias != nullptr)
#pragma omp simd
    for (int64_t c = 0; c < seen; ++c) scores[c] += widen(bias[c]);
  for (int64_t c = seen; c < room; ++c) scores[c] = -std::numeric_limits<T>::infinity();
  softmax(scores, 0, room, sink);
}

// The sums of `seen` values of `width` numbers, weighed for each query of the group.
template <int64_t PARTS, typename T, typename Raw>
void mix(const T* weights, int64_t groups, const Raw* values, int64_t seen, int64_t room, int64_t width, T* out) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  for (int64_t i = 0; i < groups * width; ++i) out[i] = 0;
  for (int64_t c = 0; c < seen; c += LANES)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t end = c + LANES < seen ? c + LANES : seen;
      const T* weight = weights + g * room;
      T* sum = out + g * width;
      if constexpr (PARTS == ANY) {
        for (int64_t i = c; i < end; ++i)
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) sum[d] += weight[i] * widen(values[i * width + d]);
      } else {
        vector whole[PARTS];
        for (int64_t j = 0; j < PARTS; ++j) whole[j] = load<T>(sum + j * LANES);
        for (int64_t i = c; i < end; ++i)
          for (int64_t j = 0; j < PARTS; ++j) whole[j] += weight[i] * load<T>(values + i * width + j * LANES);
        for (int64_t j = 0; j < PARTS; ++j) store(whole[j], sum + j * LANES);
      }
    }
}

// One of the functions above for a width: those of 32, 64 and 128 numbers stay in registers.
#define FOR_WIDTH(NAME, WIDTH)                          \
  (WIDTH == 32    ? NAME<32 / Vector<T>::lanes, T, Raw> \
   : WIDTH == 64  ? NAME<64 / Vector<T>::lanes, T, Raw> \
   : WIDTH == 128 ? NAME<128 / Vector<T>::lanes, T, Raw> \
                  : NAME<ANY, T, Raw>)

template <typename T, typename Raw>
void attend(const Raw* query, const Raw* keys, const Raw* values, const Raw* bias, const T* sinks, Raw* out,
            int64_t rows, int64_t heads, int64_t groups, int64_t columns, int64_t width, int64_t value_width,
            int64_t start, int64_t end, T scale, T softcap, int64_t threads) {
  constexpr int64_t LANES = Vector<T>::lanes;
  const int64_t seen = end - start, room = (seen + LANES - 1) / LANES * LANES;
  const auto of_keys = FOR_WIDTH(multiply, width);
  const auto of_values = FOR_WIDTH(mix, value_width);
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> scores(groups * room), sums(groups * value_width);
#pragma omp for
    for (int64_t task = 0; task < rows * heads; ++task) {
      const int64_t row = task / heads, head = task % heads, first = task * columns + start;
      of_keys(query + task * groups * width, groups, keys + first * width, seen, room, width, scores.data());
      for (int64_t g = 0; g < groups; ++g)
        normalise(scores.data() + g * room, seen, room, bias == nullptr ? nullptr : bias + row * columns + start,
                  sinks == nullptr ? nullptr : sinks + head * groups + g, scale, softcap);
      of_values(scores.data(), groups, values + first * value_width, seen, room, value_width, sums.data());
      for (int64_t i = 0; i < groups * value_width; ++i) narrow(sums[i], out + task * groups * value_width + i);
    }
  }
}

}  // namespace

#define FUNCTIONS(NAME, T, RAW)                                                                                        \
  extern "C" void attend_##NAME(const RAW* query, const RAW* keys, const RAW* values, const RAW* bias, const T* sinks, \
                                RAW* out, int64_t rows, int64_t heads, int64_t groups, int64_t columns, int64_t width, \
                                int64_t value_width, int64_t start, int64_t end, double scale, double softcap,        \
                                int64_t threads) {                                                                     \
    attend<T>(query, keys, values, bias, sinks, out, rows, heads, groups, columns, width, value_width, start, end,    \
              T(scale), T(softcap), threads);                                                                          \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
