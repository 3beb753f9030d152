// The dashboards as Grafana's own types describe them, with the panels, queries, overrides and
// annotations that we use in place of the open records of those types.
import type * as common from '@grafana/schema';
import type {
  AnnotationQuery, Dashboard, DataSourceRef, FieldColor, FieldConfig, MatcherConfig, Panel,
  RowPanel, ThresholdsConfig, ValueMap,
} from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { TempoQuery } from '@grafana/schema/dist/esm/raw/composable/tempo/dataquery/x/TempoDataQuery_types.gen';

// Copies under names of their own: several files have an `Options` and a `FieldConfig`.
type Copy<T> = Pick<T, keyof T>;
export type StatOptions = Copy<stat.Options>;
export type TableOptions = Copy<table.Options>;
export type TableFields = Partial<table.FieldConfig>;
export type TimeseriesOptions = Copy<timeseries.Options>;
export type TimeseriesFields = Copy<timeseries.FieldConfig>;
export type CellOptions = common.TableCellOptions;

export interface PrometheusRef extends DataSourceRef { type: 'prometheus' }
export interface TempoRef extends DataSourceRef { type: 'tempo' }

// @grafana/schema has no type of a Prometheus query.
export interface PrometheusQuery {
  datasource: PrometheusRef;
  editorMode: 'code';
  exemplar?: boolean;
  expr: string;
  format?: 'table';
  instant?: boolean;
  legendFormat?: string;
  range?: boolean;
  refId: string;
}

export interface TraceQuery extends Omit<TempoQuery, 'datasource' | 'queryType'> {
  datasource: TempoRef;
  queryType: 'traceql';
}

export interface PrometheusAnnotation extends Omit<AnnotationQuery, 'datasource'> {
  datasource: PrometheusRef;
  expr: string;
  step: string;
  textFormat: string;
  titleFormat: string;
}

export type Property =
  | { id: 'unit' | 'noValue'; value: string }
  | { id: 'min' | 'max' | 'decimals' | 'custom.width' | 'custom.fillOpacity'; value: number }
  | { id: 'color'; value: FieldColor }
  | { id: 'thresholds'; value: ThresholdsConfig }
  | { id: 'links'; value: { title: string; url: string; targetBlank?: boolean }[] }
  | { id: 'mappings'; value: ValueMap[] }
  | { id: 'custom.hidden' | 'custom.inspect'; value: boolean }
  | { id: 'custom.cellOptions'; value: CellOptions }
  | { id: 'custom.lineStyle'; value: common.LineStyle }
  | { id: 'custom.drawStyle'; value: common.GraphDrawStyle }
  | { id: 'custom.hideFrom'; value: common.HideSeriesConfig }
  | { id: 'custom.stacking'; value: common.StackingConfig };

export interface Override { matcher: MatcherConfig; properties: Property[] }

interface Fields<Custom> {
  defaults: Omit<FieldConfig, 'custom'> & { custom?: Custom };
  overrides: Override[];
}

interface Typed<Type, Options, Custom, Query>
  extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> {
  fieldConfig: Fields<Custom>;
  options: Options;
  targets: Query[];
  type: Type;
}

export interface QuotaDashboard extends Omit<Dashboard, 'panels' | 'annotations'> {
  annotations: { list: PrometheusAnnotation[] };
  panels: (
    | Typed<'stat', StatOptions, Record<string, never>, PrometheusQuery>
    | Typed<'table', TableOptions, TableFields, PrometheusQuery | TraceQuery>
    | Typed<'timeseries', TimeseriesOptions, TimeseriesFields, PrometheusQuery>
    | RowPanel
  )[];
}
