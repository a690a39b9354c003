// Parquet files as columns, or one row of them.

import { decompress } from "fzstd";
import { parquetMetadataAsync, parquetRead, parquetReadObjects } from "hyparquet";

const compressors = { ZSTD: (bytes) => decompress(bytes) };

// All columns of a file as arrays by name.
export async function columnsOf(buffer) {
  const columns = new Map();
  await parquetRead({
    file: buffer,
    compressors,
    utf8: false,
    onChunk: ({ columnName, columnData }) => {
      const column = columns.get(columnName) ?? [];
      for (const value of columnData) column.push(value);
      columns.set(columnName, column);
    },
  });
  return columns;
}

// One row of a file as an object; `file` is a buffer, or reads ranges of one elsewhere.
export async function rowOf(file, number, leaveOut = []) {
  const metadata = (file.metadata ??= await parquetMetadataAsync(file.buffer));
  const columns = topColumns(metadata).filter((name) => !leaveOut.includes(name));
  const range = { rowStart: number, rowEnd: number + 1 };
  const [row] = await parquetReadObjects({ file: file.buffer, metadata, compressors, utf8: false, columns, ...range });
  return row;
}

// One column of a file.
export async function columnOf(file, name) {
  const metadata = (file.metadata ??= await parquetMetadataAsync(file.buffer));
  if (!topColumns(metadata).includes(name)) return null;
  const rows = await parquetReadObjects({ file: file.buffer, metadata, compressors, utf8: false, columns: [name] });
  return rows.map((row) => row[name]);
}

// The names right below the root of a schema, which lists it depth first.
function topColumns({ schema }) {
  const names = [];
  let place = 1;
  const skip = () => {
    const children = schema[place++].num_children ?? 0;
    for (let i = 0; i < children; i++) skip();
  };
  while (place < schema.length) {
    names.push(schema[place].name);
    skip();
  }
  return names;
}
