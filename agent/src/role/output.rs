//! Output of lists and objects: text for people, JSON or YAML for programs.

use clap::ValueEnum;
use serde::Serialize;

/// Format of a list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table, whose columns may change
    #[default]
    Table,
    /// An array of objects
    Json,
    /// An array of objects
    Yaml,
}

impl std::fmt::Display for Format {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Table => "table",
            Self::Json => "json",
            Self::Yaml => "yaml",
        })
    }
}

/// Format of one object.
#[cfg(feature = "controlplane")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectFormat {
    /// Text, which may change
    #[default]
    Text,
    /// An object
    Json,
    /// An object
    Yaml,
}

#[cfg(feature = "controlplane")]
impl std::fmt::Display for ObjectFormat {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
            Self::Yaml => "yaml",
        })
    }
}

/// The object as JSON or YAML, or else its text for people.
#[cfg(feature = "controlplane")]
pub(super) fn object<T: Serialize>(format: ObjectFormat, object: &T, text: &str) -> anyhow::Result<String> {
    Ok(match format {
        ObjectFormat::Text => format!("{text}\n"),
        ObjectFormat::Json => serde_json::to_string_pretty(object)? + "\n",
        ObjectFormat::Yaml => serde_yaml_ng::to_string(object)?,
    })
}

/// Prints rows. `cells` returns the columns of a row in the table.
pub(super) fn print<T: Serialize, const N: usize>(
    format: Format,
    rows: &[T],
    header: [&str; N],
    cells: impl Fn(&T) -> Vec<Vec<String>>,
) -> anyhow::Result<()> {
    super::print(&text(format, rows, header, cells)?)
}

fn text<T: Serialize, const N: usize>(
    format: Format,
    rows: &[T],
    header: [&str; N],
    cells: impl Fn(&T) -> Vec<Vec<String>>,
) -> anyhow::Result<String> {
    if let Some(text) = for_programs(format, rows)? {
        return Ok(text);
    }
    let header = vec![header.map(str::to_owned).to_vec()];
    Ok(table(&header.into_iter().chain(rows.iter().flat_map(cells)).collect::<Vec<_>>()))
}

/// The rows as JSON or YAML. `None` if the format is for people.
pub(super) fn for_programs<T: Serialize>(format: Format, rows: &[T]) -> anyhow::Result<Option<String>> {
    Ok(match format {
        Format::Table => None,
        Format::Json => Some(serde_json::to_string_pretty(rows)? + "\n"),
        Format::Yaml => Some(serde_yaml_ng::to_string(rows)?),
    })
}

/// Lines with aligned columns.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).map_or(0, |cell| cell.chars().count());
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| cell(row, column)).max().unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(widths.iter().copied()).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("   ");
        format!("{}\n", line.trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Row {
        name: &'static str,
        size: u32,
    }

    #[test]
    fn a_list_is_a_table_json_or_yaml() {
        let rows = [Row { name: "a", size: 10 }, Row { name: "long", size: 2 }];
        let shown = |format| {
            let cells = |row: &Row| vec![vec![row.name.to_owned(), row.size.to_string()]];
            text(format, &rows, ["NAME", "SIZE"], cells).expect("text")
        };
        assert_eq!(shown(Format::Table), "NAME   SIZE\na      10\nlong   2\n");
        let read: serde_json::Value = serde_json::from_str(&shown(Format::Json)).expect("JSON");
        assert_eq!(read, serde_json::json!([{"name": "a", "size": 10}, {"name": "long", "size": 2}]));
        let yaml: serde_json::Value = serde_yaml_ng::from_str(&shown(Format::Yaml)).expect("YAML");
        assert_eq!(yaml, read);
    }

    #[test]
    fn an_empty_list_is_still_valid() {
        let none: [Row; 0] = [];
        let shown = |format| text(format, &none, ["NAME"], |_| Vec::new()).expect("text");
        assert_eq!(shown(Format::Table), "NAME\n");
        assert_eq!(shown(Format::Json), "[]\n");
        assert_eq!(shown(Format::Yaml), "[]\n");
    }
}
