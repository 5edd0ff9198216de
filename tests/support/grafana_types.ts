// The types of our dashboards, in Grafana's own types. The test appends every board as a literal.
import type * as board from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type * as bargauge from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type * as heatmap from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as timeline from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type * as history from '@grafana/schema/dist/types/raw/composable/statushistory/panelcfg/x/types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as text from '@grafana/schema/dist/types/raw/composable/text/panelcfg/x/types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';
import type { DataQuery } from '@grafana/schema';

// JSON contains an enum's text; the types require its member.
type Plain<T> = T extends string
  ? `${T}`
  : T extends (infer U)[]
    ? Plain<U>[]
    : T extends object
      ? { [K in keyof T]: Plain<T[K]> }
      : T;

// The query and the annotation of the Prometheus data source, which the schema leaves open.
interface PrometheusQuery extends DataQuery {
  editorMode: 'code';
  exemplar: boolean;
  expr: string;
  format: 'heatmap' | 'table' | 'time_series';
  instant: boolean;
  legendFormat: string;
  range: boolean;
}
interface PrometheusAnnotation {
  expr?: string;
  step?: string;
  tagKeys?: string;
  textFormat?: string;
  titleFormat?: string;
  useValueForTime?: boolean;
}

type Fields<C> = Omit<Plain<board.FieldConfigSource>, 'defaults'> & {
  defaults: Omit<Plain<board.FieldConfig>, 'custom'> & { custom: C };
};
// Every panel has a description, a position and a title.
type Frame = Omit<Plain<board.Panel>, 'options' | 'fieldConfig' | 'targets' | 'type'> &
  Required<Pick<Plain<board.Panel>, 'id' | 'gridPos' | 'title' | 'description'>>;
type Queried<T extends string, O, C> = Frame & {
  type: T;
  options: Plain<O>;
  fieldConfig: Fields<Plain<C>>;
  targets: Plain<PrometheusQuery>[];
};
type Optional<T, K extends keyof T> = Omit<T, K> & Partial<Pick<T, K>>;

export interface Panels {
  bargauge: Queried<'bargauge', bargauge.Options, Record<string, never>>;
  heatmap: Queried<'heatmap', heatmap.Options, heatmap.FieldConfig>;
  stat: Queried<'stat', stat.Options, Record<string, never>>;
  'state-timeline': Queried<'state-timeline', timeline.Options, timeline.FieldConfig>;
  'status-history': Queried<'status-history', history.Options, history.FieldConfig>;
  table: Queried<'table', Optional<table.Options, 'frameIndex'>, Optional<table.FieldConfig, never>>;
  text: Frame & { type: 'text'; options: Plain<text.Options> };
  timeseries: Queried<'timeseries', timeseries.Options, timeseries.FieldConfig>;
  row: Plain<board.RowPanel>;
}
export type Board = Omit<Plain<board.Dashboard>, 'annotations' | 'panels'> & {
  annotations: { list: (Plain<board.AnnotationQuery> & PrometheusAnnotation)[] };
};
