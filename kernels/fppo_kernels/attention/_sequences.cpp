// Packed attention, as eager.py writes it, forward and backward, one sequence and one head of keys at a time.
//
// A task copies its keys and values into rows that vectors fill, and works on TILE queries against all keys that they
// see. Products are of two kinds: rows with columns laid out for vectors (`against`), and weighed sums of rows (`mix`).

namespace {

constexpr int64_t TILE = 24, ROWS = 6;  // queries, and how many of them have their sums in registers together

template <typename T>
constexpr int64_t UNIT = 2 * Vector<T>::lanes;  // to which widths and numbers of keys are filled up

inline int64_t filled(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Rows [count, width], `stride` apart, as rows [room, wide] with zeros to the right and below.
template <typename T, typename Raw>
void copy(const Raw* from, int64_t count, int64_t stride, int64_t width, T* to, int64_t room, int64_t wide) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < width; ++d) to[i * wide + d] = widen(from[i * stride + d]);
    std::fill(to + i * wide + width, to + (i + 1) * wide, T(0));
  }
  std::fill(to + count * wide, to + room * wide, T(0));
}

// Rows [room, wide] as blocks of a vector of rows each: [room / lanes, wide, lanes].
template <typename T>
void lay(const T* rows, int64_t room, int64_t wide, T* blocks) {
  constexpr int64_t LANES = Vector<T>::lanes;
  for (int64_t i = 0; i < room; i += LANES)
    for (int64_t d = 0; d < wide; ++d)
      for (int64_t j = 0; j < LANES; ++j) blocks[i * wide + d * LANES + j] = rows[(i + j) * wide + d];
}

// out[r, c] = the product of row r of [TILE, wide] with row c of those in `blocks`, for c from `low` to `high`.
template <typename T>
void against(const T* rows, int64_t wide, const T* blocks, int64_t low, int64_t high, T* out, int64_t room) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  for (int64_t c = low; c < high; c += 2 * LANES)
    for (int64_t r = 0; r < TILE; r += ROWS) {
      const T *first = blocks + c * wide, *second = first + LANES * wide, *row = rows + r * wide;
      vector sums[ROWS][2] = {};
      for (int64_t d = 0; d < wide; ++d) {
        const vector a = load<T>(first + d * LANES), b = load<T>(second + d * LANES);
        for (int64_t i = 0; i < ROWS; ++i) {
          sums[i][0] += row[i * wide + d] * a;
          sums[i][1] += row[i * wide + d] * b;
        }
      }
      for (int64_t i = 0; i < ROWS; ++i) {
        store(sums[i][0], out + (r + i) * room + c);
        store(sums[i][1], out + (r + i) * room + c + LANES);
      }
    }
}

// out[r, c] = the product of row r of [TILE, wide] with row c of [.., wide], for c from `low` to `high`, as `dots`.
template <typename T>
void multiply(const T* rows, int64_t wide, const T* keys, int64_t low, int64_t high, T* out, int64_t room) {
  for (int64_t r = 0; r < TILE; ++r)
    for (int64_t c = low; c < high; c += Vector<T>::lanes)
      dots(rows + r * wide, keys + c * wide, wide, wide, out + r * room + c);
}

// sums[r] = the sum of row r of [TILE, room] from `low` to `high`, one after the other.
template <typename T>
void add_up(const T* rows, int64_t room, int64_t low, int64_t high, T* sums) {
  constexpr int64_t TOGETHER = 8;
  for (int64_t r = 0; r < TILE; r += TOGETHER) {
    T own[TOGETHER] = {};
    for (int64_t c = low; c < high; ++c)
      for (int64_t i = 0; i < TOGETHER; ++i) own[i] += rows[(r + i) * room + c];
    std::copy(own, own + TOGETHER, sums + r);
  }
}

// out[r] += the sum over c of weights[r * by_row + c * by_column] * rows[c], for r from `low` to `high`.
template <int64_t ROWS, typename T>
void mix(const T* weights, int64_t by_row, int64_t by_column, int64_t low, int64_t high, const T* rows, int64_t begin,
         int64_t end, int64_t wide, T* out) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  for (int64_t r = low; r < high; r += ROWS)
    for (int64_t d = 0; d < wide; d += 2 * LANES) {
      vector sums[ROWS][2];
      for (int64_t i = 0; i < ROWS; ++i)
        for (int64_t j = 0; j < 2; ++j) sums[i][j] = load<T>(out + (r + i) * wide + d + j * LANES);
      for (int64_t c = begin; c < end; ++c) {
        const vector a = load<T>(rows + c * wide + d), b = load<T>(rows + c * wide + d + LANES);
        for (int64_t i = 0; i < ROWS; ++i) {
          const T weight = weights[(r + i) * by_row + c * by_column];
          sums[i][0] += weight * a;
          sums[i][1] += weight * b;
        }
      }
      for (int64_t i = 0; i < ROWS; ++i)
        for (int64_t j = 0; j < 2; ++j) store(sums[i][j], out + (r + i) * wide + d + j * LANES);
    }
}

template <typename T>
struct Rule {
  int64_t window;    // 0: none
  T scale, softcap;  // softcap 0: none
};

// What one head of queries has to do with the keys of a sequence.
template <typename T>
struct Span {
  const int64_t queries, keys, window, room;

  Span(int64_t start, int64_t end, int64_t key_start, int64_t key_end, int64_t window)
      : queries(end - start), keys(key_end - key_start), window(window), room(filled(keys, UNIT<T>)) {}

  int64_t place(int64_t query) const { return query + keys - queries; }
  int64_t first(int64_t query) const {
    const int64_t at = place(query) - window + 1;
    return window == 0 || at < 0 ? 0 : at;
  }
  // The columns that a tile of `count` queries works on, in whole units.
  int64_t low(int64_t begin) const { return first(begin) / UNIT<T> * UNIT<T>; }
  int64_t high(int64_t begin, int64_t count) const { return filled(place(begin + count - 1) + 1, UNIT<T>); }
};

// Products to scores: scaled, bent by the softcap, and -inf where a query does not see a key.
template <typename T>
void finish(T* scores, const Rule<T>& rule, const Span<T>& span, int64_t query, int64_t low, int64_t high) {
  for (int64_t c = low; c < high; c += Vector<T>::lanes) store(load<T>(scores + c) * rule.scale, scores + c);
  if (rule.softcap != T(0))
#pragma omp simd
    for (int64_t c = low; c < high; ++c) scores[c] = rule.softcap * tangent(scores[c] / rule.softcap);
  const T nothing = -std::numeric_limits<T>::infinity();
  for (int64_t c = low; c < span.first(query); ++c) scores[c] = nothing;
  for (int64_t c = span.place(query) + 1; c < high; ++c) scores[c] = nothing;
}

// Scores to weights, and the slopes by the weights to those by the products.
template <typename T>
void differentiate(T* scores, T* slopes, int64_t low, int64_t high, T log_sum, T dot, const Rule<T>& rule) {
  for (int64_t c = low; c < high; c += Vector<T>::lanes) {
    const auto score = load<T>(scores + c), weight = exponentials(score - log_sum);
    auto slope = weight * (load<T>(slopes + c) - dot) * rule.scale;
    if (rule.softcap != T(0)) {
      const auto bent = score / rule.softcap;
      slope = weight > T(0) ? slope * (1 - bent * bent) : slope;  // no score of -inf
    }
    store(weight, scores + c);
    store(slope, slopes + c);
  }
}

struct Sizes {
  int64_t sequences, heads, kv_heads, width, value_width;
  int64_t groups() const { return heads / kv_heads; }
};

// The keys, or the values, of a sequence and of one head, and what backward sums up for them.
template <typename T>
struct Side {
  const int64_t width, wide = filled(width, UNIT<T>);
  std::vector<T> rows, blocks, sums;

  template <typename Raw>
  void read(const Raw* from, int64_t count, int64_t room, int64_t heads) {
    rows.resize(room * wide);
    copy(from, count, heads * width, width, rows.data(), room, wide);
  }
  void lay_out() {
    blocks.resize(rows.size());
    lay(rows.data(), int64_t(rows.size()) / wide, wide, blocks.data());
  }
};

// Rows of which each has been summed up, to those of one head among `heads`.
template <typename T, typename Raw>
void write(const T* rows, int64_t count, int64_t wide, Raw* to, int64_t heads, int64_t width) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < width; ++d) narrow(rows[i * wide + d], to + i * heads * width + d);
}

template <typename T, typename Raw>
void forward(const Raw* query, const Raw* key, const Raw* value, const T* sinks, const int64_t* ends,
             const int64_t* key_ends, Raw* out, T* log_sums, Sizes s, Rule<T> rule, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    Side<T> keys{s.width}, values{s.value_width};
    std::vector<T> scores, tile(TILE * keys.wide), sums(TILE * values.wide);
    T largest[TILE], totals[TILE];
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < s.sequences * s.kv_heads; ++task) {
      const int64_t sequence = task / s.kv_heads, kv = task % s.kv_heads, start = ends[sequence];
      const Span<T> span(start, ends[sequence + 1], key_ends[sequence], key_ends[sequence + 1], rule.window);
      const int64_t at = key_ends[sequence] * s.kv_heads + kv;
      keys.read(key + at * s.width, span.keys, span.room, s.kv_heads);
      values.read(value + at * s.value_width, span.keys, span.room, s.kv_heads);
      scores.resize(TILE * span.room);
      for (int64_t head = kv * s.groups(); head < (kv + 1) * s.groups(); ++head)
        for (int64_t begin = 0; begin < span.queries; begin += TILE) {
          const int64_t tokens = std::min(TILE, span.queries - begin), first = (start + begin) * s.heads + head;
          const int64_t low = span.low(begin), high = span.high(begin, tokens);
          const T* sink = sinks == nullptr ? nullptr : sinks + head;
          copy(query + first * s.width, tokens, s.heads * s.width, s.width, tile.data(), TILE, keys.wide);
          multiply(tile.data(), keys.wide, keys.rows.data(), low, high, scores.data(), span.room);
          for (int64_t i = 0; i < tokens; ++i) {
            T* row = scores.data() + i * span.room;
            finish(row, rule, span, begin + i, low, high);
            largest[i] = exponentiate(row, low, high, sink);
          }
          add_up(scores.data(), span.room, low, high, totals);
          std::fill(sums.begin(), sums.end(), T(0));
          mix<ROWS>(scores.data(), span.room, 1, 0, TILE, values.rows.data(), low, high, values.wide, sums.data());
          for (int64_t i = 0; i < tokens; ++i) {
            const T total = denominator(totals[i], largest[i], sink), share = 1 / total;
            for (int64_t d = 0; d < values.wide; ++d) sums[i * values.wide + d] *= share;
            log_sums[first + i * s.heads] = largest[i] + std::log(total);
          }
          write(sums.data(), tokens, values.wide, out + first * s.value_width, s.heads, s.value_width);
        }
    }
  }
}

// The slopes by queries, keys and values, from those by the result; `dots` [N, heads] are their products with it.
template <typename T, typename Raw>
void backward(const Raw* query, const Raw* key, const Raw* value, const Raw* grad, const T* log_sums, const T* dots,
              const int64_t* ends, const int64_t* key_ends, Raw* d_query, Raw* d_key, Raw* d_value, Sizes s,
              Rule<T> rule, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    Side<T> keys{s.width}, values{s.value_width};
    std::vector<T> scores, slopes, tile(TILE * keys.wide), grads(TILE * values.wide), sums(TILE * keys.wide);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < s.sequences * s.kv_heads; ++task) {
      const int64_t sequence = task / s.kv_heads, kv = task % s.kv_heads, start = ends[sequence];
      const Span<T> span(start, ends[sequence + 1], key_ends[sequence], key_ends[sequence + 1], rule.window);
      const int64_t at = key_ends[sequence] * s.kv_heads + kv;
      keys.read(key + at * s.width, span.keys, span.room, s.kv_heads);
      values.read(value + at * s.value_width, span.keys, span.room, s.kv_heads);
      keys.lay_out(), values.lay_out();
      keys.sums.assign(keys.rows.size(), T(0)), values.sums.assign(values.rows.size(), T(0));
      scores.resize(TILE * span.room), slopes.resize(TILE * span.room);
      for (int64_t head = kv * s.groups(); head < (kv + 1) * s.groups(); ++head)
        for (int64_t begin = 0; begin < span.queries; begin += TILE) {
          const int64_t tokens = std::min(TILE, span.queries - begin), first = (start + begin) * s.heads + head;
          const int64_t low = span.low(begin), high = span.high(begin, tokens);
          copy(query + first * s.width, tokens, s.heads * s.width, s.width, tile.data(), TILE, keys.wide);
          const Raw* slope = grad + first * s.value_width;
          copy(slope, tokens, s.heads * s.value_width, s.value_width, grads.data(), TILE, values.wide);
          against(tile.data(), keys.wide, keys.blocks.data(), low, high, scores.data(), span.room);
          against(grads.data(), values.wide, values.blocks.data(), low, high, slopes.data(), span.room);
          for (int64_t i = 0; i < TILE; ++i) {
            T *row = scores.data() + i * span.room, *by_row = slopes.data() + i * span.room;
            if (i >= tokens) {
              std::fill(row + low, row + high, T(0)), std::fill(by_row + low, by_row + high, T(0));
              continue;
            }
            finish(row, rule, span, begin + i, low, high);
            differentiate(row, by_row, low, high, log_sums[first + i * s.heads], dots[first + i * s.heads], rule);
          }
          std::fill(sums.begin(), sums.end(), T(0));
          mix<ROWS>(slopes.data(), span.room, 1, 0, TILE, keys.rows.data(), low, high, keys.wide, sums.data());
          mix<4>(slopes.data(), 1, span.room, low, high, tile.data(), 0, TILE, keys.wide, keys.sums.data());
          mix<4>(scores.data(), 1, span.room, low, high, grads.data(), 0, TILE, values.wide, values.sums.data());
          write(sums.data(), tokens, keys.wide, d_query + first * s.width, s.heads, s.width);
        }
      write(keys.sums.data(), span.keys, keys.wide, d_key + at * s.width, s.kv_heads, s.width);
      write(values.sums.data(), span.keys, values.wide, d_value + at * s.value_width, s.kv_heads, s.value_width);
    }
  }
}

}  // namespace

#define NUMBERS                                                                                                   \
  int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width, int64_t value_width, int64_t window,         \
      double scale, double softcap, int64_t threads
#define READ(T) Sizes{sequences, heads, kv_heads, width, value_width}, Rule<T>{window, T(scale), T(softcap)}, threads
#define FUNCTIONS(NAME, T, RAW)                                                                                    \
  extern "C" void forward_##NAME(const RAW* query, const RAW* key, const RAW* value, const T* sinks,              \
                                 const int64_t* ends, const int64_t* key_ends, RAW* out, T* log_sums, NUMBERS) {  \
    forward<T>(query, key, value, sinks, ends, key_ends, out, log_sums, READ(T));                                 \
  }                                                                                                                \
  extern "C" void backward_##NAME(const RAW* query, const RAW* key, const RAW* value, const RAW* grad,            \
                                  const T* log_sums, const T* dots, const int64_t* ends, const int64_t* key_ends, \
                                  RAW* d_query, RAW* d_key, RAW* d_value, NUMBERS) {                               \
    backward<T>(query, key, value, grad, log_sums, dots, ends, key_ends, d_query, d_key, d_value, READ(T));       \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
