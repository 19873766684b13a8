//! Pictures of results: lines over linear or logarithmic axes, groups of bars, cumulative
//! distributions; each written as SVG and as PNG.
//!
//! A small layer over the `kuva` crate: an experiment supplies the data, and this module decides
//! the look of all pictures. The palette is suitable for colour-blind readers, each series has a
//! marker besides its colour, and the legend is outside the axes.

use std::fs;
use std::path::{Path, PathBuf};

use kuva::backend::svg::SvgBackend;
use kuva::prelude::{
    BarPlot, Figure, FigureLegendPosition, Layout, LegendEntry, LegendPosition, LegendShape,
    LinePlot, LineStyle, MarkerShape, Plot, ReferenceLine, ScatterPlot, TickFormat,
};
use kuva::render::render::{Scene, render_multiple};
use kuva::{Palette, RasterBackend};

use crate::Error;
use crate::histogram::Latencies;
use units::Size;
use units::number::{engineering, significant};

/// Width and height in logical pixels, without the legend.
const AREA_PX: (f64, f64) = (680.0, 440.0);
/// Width of the legend: of its frame with the marker, and of each character.
const LEGEND_PX: (f64, f64) = (50.0, 7.5);
/// Pixels of a PNG per logical pixel.
const PNG_SCALE: f32 = 2.0;
/// Colour of the line at a paper's number.
const PAPER_COLOUR: &str = "#555555";
/// Dash pattern of the line at a paper's number.
const PAPER_DASHES: &str = "2 3";

/// Label and scale of an axis.
#[derive(Clone, Debug)]
pub struct Axis {
    label: String,
    scale: Scale,
}

/// How an axis maps values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    Linear,
    Log,
    LogBytes,
    Share,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Linear }
    }

    /// A logarithmic axis; values must be above zero.
    pub fn log(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Log }
    }

    /// A logarithmic axis of sizes in bytes, ticked at powers of two.
    pub fn bytes(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::LogBytes }
    }

    /// A linear axis from 0 to 1, ticked in percent.
    pub fn share(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Share }
    }

    /// Position of a value on the axis that `kuva` draws; `None` if the axis cannot show the value.
    /// Logarithmic axes of `kuva` have decades only, so an axis of bytes is a linear axis over the
    /// binary logarithm.
    fn position(&self, value: f64) -> Option<f64> {
        match self.scale {
            Scale::Linear | Scale::Share => value.is_finite().then_some(value),
            Scale::Log => (value.is_finite() && value > 0.0).then_some(value),
            Scale::LogBytes => (value.is_finite() && value > 0.0).then(|| value.log2()),
        }
    }

    fn ticks(&self) -> TickFormat {
        TickFormat::Custom(std::sync::Arc::new(match self.scale {
            Scale::Linear | Scale::Log => tick,
            Scale::Share => |share| format!("{:.0}%", share * 100.0),
            Scale::LogBytes => |power: f64| {
                if power.fract() == 0.0 && (0.0..63.0).contains(&power) {
                    Size(1 << power as u32).rounded()
                } else {
                    String::new()
                }
            },
        }))
    }
}

/// Formats a tick: as a number of three digits, without trailing zeros.
fn tick(value: f64) -> String {
    let text = if value.abs() >= 1000.0 { engineering(value) } else { significant(value) };
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let prefix = &text[number.len()..];
    if !number.contains('.') || number.contains('e') {
        return text;
    }
    format!("{}{prefix}", number.trim_end_matches('0').trim_end_matches('.'))
}

/// Lines (with markers) over two axes.
#[derive(Clone, Debug)]
pub struct Lines {
    title: String,
    subtitle: String,
    x: Axis,
    y: Axis,
    series: Vec<Series>,
    papers: Vec<(String, f64)>,
}

#[derive(Clone, Debug)]
struct Series {
    name: String,
    points: Vec<(f64, f64)>,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Solid,
    Dashed,
    Points,
    Steps,
}

impl Lines {
    /// An empty picture with a title and axes.
    pub fn new(title: &str, x: Axis, y: Axis) -> Self {
        Self {
            title: title.into(),
            subtitle: String::new(),
            x,
            y,
            series: Vec::new(),
            papers: Vec::new(),
        }
    }

    /// A cumulative distribution of latencies over a logarithmic axis of microseconds.
    pub fn cdf<'a>(
        title: &str,
        series: impl IntoIterator<Item = (&'a str, &'a Latencies)>,
    ) -> Self {
        let mut lines = Self::new(title, Axis::log("latency (us)"), Axis::share("share of all"));
        for (name, latencies) in series {
            lines.push(name, latencies.cdf(), Form::Steps);
        }
        lines
    }

    /// Sets a line under the title: the measured machine, or "simulated".
    pub fn subtitle(mut self, subtitle: &str) -> Self {
        self.subtitle = subtitle.into();
        self
    }

    /// Adds a series: a solid line with markers.
    pub fn line(mut self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.push(name, points, Form::Solid);
        self
    }

    /// Adds a series of a baseline: a dashed line with markers.
    pub fn baseline(mut self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.push(name, points, Form::Dashed);
        self
    }

    /// Adds a series of points without a line.
    pub fn scatter(mut self, name: &str, points: Vec<(f64, f64)>) -> Self {
        self.push(name, points, Form::Points);
        self
    }

    /// Adds a horizontal line, for a paper's number or a value that does not depend on x.
    pub fn paper(mut self, name: &str, value: f64) -> Self {
        self.papers.push((name.into(), value));
        self
    }

    fn push(&mut self, name: &str, points: Vec<(f64, f64)>, form: Form) {
        self.series.push(Series { name: name.into(), points, form });
    }

    /// Writes `NAME.svg` and `NAME.png` into a directory, which is created if it is missing.
    ///
    /// # Errors
    /// [`Error::Write`] if a file cannot be written; [`Error::Draw`] if no series has a point that
    /// its axes can show.
    pub fn write(&self, directory: &Path, name: &str) -> Result<[PathBuf; 2], Error> {
        let (plots, layout, legend) = self.drawn(name, 10.0)?;
        let layout = look(layout, &self.title, &self.subtitle, legend);
        write(plots, layout, directory, name)
    }

    /// The plots, the layout and the legend of one panel, without the look of a picture. An axis of
    /// bytes has room for `ticks`.
    fn drawn(
        &self,
        name: &str,
        ticks: f64,
    ) -> Result<(Vec<Plot>, Layout, Vec<LegendEntry>), Error> {
        let bright = Palette::tol_bright();
        let enough = self.series.len() <= bright.len();
        let colours = if enough { bright } else { Palette::tol_muted() };
        let mut plots = Vec::new();
        let mut legend = Vec::new();
        for (at, series) in self.series.iter().enumerate() {
            let colour = colours[at].to_owned();
            let marker = MARKERS[at % MARKERS.len()];
            let position = |&(x, y): &(f64, f64)| Some((self.x.position(x)?, self.y.position(y)?));
            let points: Vec<(f64, f64)> = series.points.iter().filter_map(position).collect();
            if points.is_empty() {
                continue;
            }
            plots.extend(series.form.plots(&points, &colour, marker));
            legend.push(series.form.legend(&series.name, &colour, marker));
        }
        if plots.is_empty() {
            let why = "no series has a point to show".into();
            return Err(Error::Draw { picture: name.into(), why });
        }
        let mut layout = Layout::auto_from_plots(&plots)
            .with_x_label(&self.x.label)
            .with_y_label(&self.y.label)
            .with_x_tick_format(self.x.ticks())
            .with_y_tick_format(self.y.ticks());
        for (name, value) in &self.papers {
            let Some(value) = self.y.position(*value) else { continue };
            layout = layout.with_reference_line(
                ReferenceLine::horizontal(value)
                    .with_color(PAPER_COLOUR)
                    .with_dasharray(PAPER_DASHES),
            );
            legend.push(LegendEntry {
                label: name.clone(),
                color: PAPER_COLOUR.into(),
                shape: LegendShape::Line,
                dasharray: Some(PAPER_DASHES.into()),
            });
        }
        layout = match (self.x.scale == Scale::Log, self.y.scale == Scale::Log) {
            (true, true) => layout.with_log_scale(),
            (true, false) => layout.with_log_x(),
            (false, true) => layout.with_log_y(),
            (false, false) => layout,
        };
        if self.x.scale == Scale::LogBytes {
            let (smallest, largest) = self.span_of_bytes();
            let step = ((largest - smallest) / ticks).ceil().max(1.0);
            // A margin of half a power of two on both sides, so that no marker is cut off. Ticks
            // count from the left end, which must therefore be a multiple of the step.
            let left = ((smallest - 0.5) / step).floor() * step;
            layout =
                layout.with_x_tick_step(step).with_x_axis_min(left).with_x_axis_max(largest + 0.5);
        }
        if self.y.scale == Scale::Share {
            layout = layout.with_y_axis_min(0.0).with_y_axis_max(1.0).with_y_tick_step(0.25);
        }
        Ok((plots, layout, legend))
    }

    /// Exponents of the smallest and largest power of two that an axis of bytes shows.
    fn span_of_bytes(&self) -> (f64, f64) {
        let powers = self.series.iter().flat_map(|series| &series.points);
        let powers = powers.filter_map(|(x, _)| self.x.position(*x));
        let (smallest, largest) =
            powers.fold((f64::MAX, f64::MIN), |(min, max), x| (min.min(x), max.max(x)));
        (smallest.floor(), largest.ceil())
    }
}

/// Markers of the series, so that series are distinguishable without colours.
const MARKERS: [MarkerShape; 6] = [
    MarkerShape::Circle,
    MarkerShape::Square,
    MarkerShape::Triangle,
    MarkerShape::Diamond,
    MarkerShape::TriangleDown,
    MarkerShape::Star,
];

impl Form {
    fn plots(self, points: &[(f64, f64)], colour: &str, marker: MarkerShape) -> Vec<Plot> {
        let line = || {
            let style = match self {
                Self::Dashed => LineStyle::Custom("9 6".into()),
                _ => LineStyle::Solid,
            };
            LinePlot::new()
                .with_data(points.iter().copied())
                .with_color(colour)
                .with_stroke_width(2.0)
                .with_line_style(style)
        };
        let markers = || {
            ScatterPlot::new()
                .with_data(points.iter().copied())
                .with_color(colour)
                .with_marker(marker)
                .with_size(4.5)
        };
        match self {
            Self::Solid | Self::Dashed => vec![line().into(), markers().into()],
            Self::Points => vec![markers().into()],
            Self::Steps => vec![line().with_step().into()],
        }
    }

    fn legend(self, name: &str, colour: &str, marker: MarkerShape) -> LegendEntry {
        let shape = match self {
            Self::Steps => LegendShape::Line,
            _ => LegendShape::Marker(marker),
        };
        LegendEntry { label: name.into(), color: colour.into(), shape, dasharray: None }
    }
}

/// A picture with several panels and one legend. All panels must have the same series in the same
/// order.
#[derive(Clone, Debug)]
pub struct Panels {
    title: String,
    columns: usize,
    panels: Vec<Lines>,
}

impl Panels {
    /// A picture without panels; panels fill rows of `columns`.
    pub fn new(title: &str, columns: usize) -> Self {
        Self { title: title.into(), columns, panels: Vec::new() }
    }

    /// Adds a panel; its title is printed above it.
    pub fn panel(mut self, lines: Lines) -> Self {
        self.panels.push(lines);
        self
    }

    /// Writes the picture, as [`Lines::write`] does.
    ///
    /// # Errors
    /// As [`Lines::write`].
    pub fn write(&self, directory: &Path, name: &str) -> Result<[PathBuf; 2], Error> {
        let (mut plots, mut layouts, mut legend) = (Vec::new(), Vec::new(), Vec::new());
        for lines in &self.panels {
            let (drawn, layout, entries) = lines.drawn(name, 5.0)?;
            plots.push(drawn);
            layouts.push(layout.with_title(&lines.title).with_title_size(15).with_body_size(13));
            for entry in entries {
                if legend.iter().all(|known: &LegendEntry| known.label != entry.label) {
                    legend.push(entry);
                }
            }
        }
        let figure = Figure::new(self.panels.len().div_ceil(self.columns), self.columns)
            .with_title(&self.title)
            .with_plots(plots)
            .with_layouts(layouts)
            .with_shared_legend_position(FigureLegendPosition::RightTop)
            .with_shared_legend_entries(legend);
        write_scene(&figure.render(), directory, name)
    }
}

/// Groups of bars: one group per category, one bar per series in each.
#[derive(Clone, Debug)]
pub struct Bars {
    title: String,
    subtitle: String,
    y: Axis,
    series: Vec<String>,
    groups: Vec<(String, Vec<f64>)>,
}

impl Bars {
    /// An empty picture; `y_label` is the quantity that the height of the bars shows.
    pub fn new<'a>(title: &str, y_label: &str, series: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            title: title.into(),
            subtitle: String::new(),
            y: Axis::linear(y_label),
            series: series.into_iter().map(Into::into).collect(),
            groups: Vec::new(),
        }
    }

    /// Sets a line under the title: the measured machine, or "simulated".
    pub fn subtitle(mut self, subtitle: &str) -> Self {
        self.subtitle = subtitle.into();
        self
    }

    /// Adds a category with one value for each series.
    pub fn group(mut self, name: &str, values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        assert_eq!(values.len(), self.series.len(), "a group has a value for each series");
        self.groups.push((name.into(), values));
        self
    }

    /// Writes `NAME.svg` and `NAME.png` into a directory, which is created if it is missing.
    ///
    /// # Errors
    /// [`Error::Write`] if a file cannot be written; [`Error::Draw`] if there is no group.
    pub fn write(&self, directory: &Path, name: &str) -> Result<[PathBuf; 2], Error> {
        if self.groups.is_empty() || self.series.is_empty() {
            return Err(Error::Draw { picture: name.into(), why: "there are no bars".into() });
        }
        let colours = Palette::tol_bright();
        let mut bars = BarPlot::new().with_width(0.75);
        for (group, values) in &self.groups {
            let values = values.iter().enumerate();
            let values = values.map(|(at, &value)| (value, colours[at].to_owned()));
            bars = bars.with_group(group.clone(), values);
        }
        let legend = self.series.iter().enumerate().map(|(at, series)| LegendEntry {
            label: series.clone(),
            color: colours[at].to_owned(),
            shape: LegendShape::Rect,
            dasharray: None,
        });
        let legend: Vec<LegendEntry> = legend.collect();
        let plots = vec![Plot::Bar(bars)];
        let layout = Layout::auto_from_plots(&plots)
            .with_y_label(&self.y.label)
            .with_y_tick_format(self.y.ticks());
        let layout = look(layout, &self.title, &self.subtitle, legend);
        write(plots, layout, directory, name)
    }
}

/// Applies the common look of all pictures.
fn look(layout: Layout, title: &str, subtitle: &str, legend: Vec<LegendEntry>) -> Layout {
    let longest = legend.iter().map(|entry| entry.label.chars().count()).max().unwrap_or(0);
    let layout = layout
        .with_title(title)
        .with_width(AREA_PX.0 + LEGEND_PX.0 + LEGEND_PX.1 * longest as f64)
        .with_height(AREA_PX.1)
        .with_title_size(18)
        .with_label_size(15)
        .with_tick_size(13)
        .with_body_size(13)
        .with_legend_position(LegendPosition::OutsideRightTop)
        .with_legend_entries(legend);
    if subtitle.is_empty() { layout } else { layout.with_subtitle(subtitle) }
}

fn write(
    plots: Vec<Plot>,
    layout: Layout,
    directory: &Path,
    name: &str,
) -> Result<[PathBuf; 2], Error> {
    write_scene(&render_multiple(plots, layout), directory, name)
}

fn write_scene(scene: &Scene, directory: &Path, name: &str) -> Result<[PathBuf; 2], Error> {
    let svg = SvgBackend::new().render_scene(scene);
    let png = RasterBackend::new()
        .with_scale(PNG_SCALE)
        .render_scene(scene)
        .map_err(|why| Error::Draw { picture: name.into(), why })?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::Write { path, source }
    };
    fs::create_dir_all(directory).map_err(failed(directory))?;
    let files = [("svg", svg.into_bytes()), ("png", png)].map(|(extension, bytes)| {
        let path = directory.join(format!("{name}.{extension}"));
        units::files::write(&path, &bytes).map_err(failed(&path)).map(|()| path)
    });
    let [svg, png] = files;
    Ok([svg?, png?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(files: [PathBuf; 2]) -> (String, Vec<u8>) {
        let [svg, png] = files;
        (fs::read_to_string(svg).unwrap(), fs::read(png).unwrap())
    }

    #[test]
    fn lines_are_written_as_svg_and_png() {
        let directory = tempfile::tempdir().unwrap();
        let files = Lines::new("READ", Axis::bytes("size"), Axis::log("latency (us)"))
            .subtitle("shm, 1 client")
            .line("onesidedmw", vec![(8.0, 0.4), (4096.0, 0.6), (1048576.0, 40.0)])
            .baseline("bare", vec![(8.0, 0.26), (4096.0, 0.29), (1048576.0, 35.0)])
            .paper("paper", 10.7)
            .write(&directory.path().join("new"), "read")
            .unwrap();
        let (svg, png) = written(files);
        for text in ["READ", "shm, 1 client", "4KiB", "onesidedmw", "bare", "paper"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        assert!(png.starts_with(b"\x89PNG"));
    }

    #[test]
    fn bars_and_distributions_are_written() {
        let directory = tempfile::tempdir().unwrap();
        let files = Bars::new("fault", "us a page", ["granary", "bare"])
            .group("random", [9.0, 7.4])
            .group("sequential", [1.6, 1.25])
            .write(directory.path(), "fault")
            .unwrap();
        assert!(written(files).0.contains("sequential"));

        let mut latencies = Latencies::new();
        (1..=1000).for_each(|us| latencies.record_ns(us * 1000));
        let files = Lines::cdf("allocation", [("onesidedmw", &latencies)])
            .write(directory.path(), "cdf")
            .unwrap();
        assert!(written(files).0.contains("share of all"));
    }

    #[test]
    fn panels_share_a_legend() {
        let directory = tempfile::tempdir().unwrap();
        let panel = |title| {
            Lines::new(title, Axis::bytes("size"), Axis::log("latency (us)"))
                .line("onesidedmw", vec![(4096.0, 0.6), (65536.0, 4.0)])
                .baseline("finemem", vec![(4096.0, 0.5)])
        };
        let panels = Panels::new("allocation", 2).panel(panel("median")).panel(panel("P99"));
        let (svg, png) = written(panels.write(directory.path(), "panels").unwrap());
        for text in ["allocation", "median", "P99", "64KiB"] {
            assert!(svg.contains(text), "{text} is missing");
        }
        assert_eq!(svg.matches("onesidedmw").count(), 1, "one legend");
        assert!(png.starts_with(b"\x89PNG"));
    }

    #[test]
    fn picture_without_points_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let empty = Lines::new("x", Axis::log("x"), Axis::log("y")).line("a", vec![(1.0, 0.0)]);
        let error = empty.write(directory.path(), "empty").unwrap_err();
        assert!(error.to_string().contains("no series has a point"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn write_error_names_the_path() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let bars = Bars::new("x", "y", ["a"]).group("g", [1.0]);
        let error = bars.write(&file, "x").unwrap_err();
        assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
        assert!(error.to_string().contains("--out"), "{error}");
    }

    #[test]
    fn ticks_are_short() {
        for (value, text) in
            [(0.0, "0"), (0.2, "0.2"), (10.0, "10"), (200.0, "200"), (1e6, "1M"), (1500.0, "1.5k")]
        {
            assert_eq!(tick(value), text);
        }
    }
}
