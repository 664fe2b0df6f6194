/** What each rank used at the step that is shown, with its peak. */

import type { LoadSample } from "../../api/types.ts";
import { Box, TableHead } from "../../components/Box.tsx";
import { formatBytes, formatInteger, NOT_MEASURED } from "../../format/number.ts";
import { formatExact } from "../../format/time.ts";
import { rankLoads, type StepClock } from "./load.ts";

const GIB = 2 ** 30;

function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? NOT_MEASURED : `${formatInteger(value)} %`;
}

function gib(value: number | null | undefined): string {
  return formatBytes(value === null || value === undefined ? null : value * GIB);
}

interface Props {
  samples: readonly LoadSample[];
  clock: StepClock | null;
  step: number | null;
}

export function LoadBox({ samples, clock, step }: Props) {
  const loads = rankLoads(samples, clock, step);
  const hasGpu = loads.some(({ peak }) => peak.gpu_memory !== null);
  const node = loads[0]?.shown;
  return (
    <Box title="System load" label="System load" aside="here · peak">
      <table className="grid-table">
        <TableHead cells={["Rank", ...(hasGpu ? ["GPU", "GPU memory"] : []), "CPU", "Memory"]} />
        <tbody>
          {loads.map(({ rank, shown, peak }) => (
            <tr key={rank} title={formatExact(shown.at * 1000)}>
              <th scope="row">{rank}</th>
              {hasGpu && <Pair now={percent(shown.gpu_percent)} peak={percent(peak.gpu)} />}
              {hasGpu && <Pair now={formatBytes(shown.gpu_memory_bytes)} peak={gib(peak.gpu_memory)} />}
              <Pair now={percent(shown.cpu_percent)} peak={percent(peak.cpu)} />
              <Pair now={formatBytes(shown.memory_bytes)} peak={gib(peak.memory)} />
            </tr>
          ))}
        </tbody>
      </table>
      {node && node.node_memory_bytes !== null && (
        <p className="body ink-3 num">
          Rank {node.rank}'s whole node: {node.node_cpu_percent !== null && `${percent(node.node_cpu_percent)} CPU, `}
          {formatBytes(node.node_memory_bytes)} in use of its {formatBytes(node.node_memory_total_bytes)} of memory.
        </p>
      )}
    </Box>
  );
}

function Pair({ now, peak }: { now: string; peak: string }) {
  return (
    <td>
      {now} <span className="ink-3">· {peak}</span>
    </td>
  );
}
