//! The settings of a configuration file, and their parsing from TOML.

use std::collections::BTreeMap;

use super::nearest::{self, Tables};

/// The settings of a file, by table and name, and the problems found in it.
#[derive(Debug, Default)]
pub(crate) struct File {
    /// Value and place of each setting.
    values: BTreeMap<(&'static str, &'static str), (FileValue, String)>,
    pub(crate) problems: Vec<String>,
}

/// A value of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileValue {
    /// A string, number or boolean as text.
    Single(String),
    /// An array of single values.
    List(Vec<String>),
    /// A table of single values.
    Map(BTreeMap<String, String>),
}

/// A key of a TOML file; the table is empty for keys outside tables.
struct TomlKey<'a> {
    table: &'a str,
    name: &'a str,
}

// === impl File ===

impl File {
    /// Parses TOML. Keys outside tables belong to the table with an empty name.
    pub(crate) fn parse_toml(text: &str, place: &str, tables: &Tables) -> anyhow::Result<Self> {
        let parsed = toml::from_str::<toml::Table>(text).map_err(|error| {
            // The library's text has several lines. Errors of settings have one.
            let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            anyhow::anyhow!("cannot parse {place}, line {line}: {}", error.message())
        })?;
        let mut file = Self::default();
        for (key, value) in parsed {
            match (value, tables.iter().any(|(name, _)| *name == key && !key.is_empty())) {
                (toml::Value::Table(table), true) => {
                    for (name, value) in table {
                        file.add_toml(TomlKey { table: &key, name: &name }, value, place, tables);
                    }
                }
                (_, true) => file.problems.push(format!("{place} {key}: expected a table")),
                (value, false) => file.add_toml(TomlKey { table: "", name: &key }, value, place, tables),
            }
        }
        Ok(file)
    }

    fn add_toml(&mut self, key: TomlKey<'_>, value: toml::Value, place: &str, tables: &Tables) {
        let TomlKey { table, name } = key;
        let key = if table.is_empty() { name.to_owned() } else { format!("{table}.{name}") };
        let fields = tables.iter().filter(|(key, _)| *key == table);
        let mut fields = fields.flat_map(|(key, fields)| fields.iter().map(move |field| (*key, field)));
        // The keys `config` and `config-dir` are invalid in a file, because they name the files.
        let is_path_of_files = ["config", "config-dir"].contains(&name);
        let known = fields.find(|(_, field)| !is_path_of_files && field.names().any(|known| known == name));
        let Some((table, field)) = known else {
            let hint = match value {
                toml::Value::Table(_) if table.is_empty() => nearest::table_hint(name, tables),
                _ => nearest::hint(table, name, tables),
            };
            self.problems.push(format!("{place} {key}: unknown key{hint}"));
            return;
        };
        match FileValue::from_toml(value) {
            Some(value) => self.insert(table, field.name, value, format!("{place} {key}")),
            None => self.problems.push(format!("{place} {key}: expected a single value, array or table")),
        }
    }

    /// Adds a setting with a description of its place.
    pub(crate) fn insert(
        &mut self,
        table: &'static str,
        name: &'static str,
        value: FileValue,
        place: String,
    ) {
        let key = (table, name);
        // The file sets one setting by two names.
        if let Some((_, first)) = self.values.get(&key) {
            self.problems.push(format!("{place}: {first} gives the same setting"));
            return;
        }
        self.values.insert(key, (value, place));
    }

    /// The value of a setting, and a description of its place.
    pub(crate) fn get(&self, table: &'static str, name: &'static str) -> Option<(&FileValue, &str)> {
        self.values.get(&(table, name)).map(|(value, place)| (value, place.as_str()))
    }
}

// === impl FileValue ===

impl FileValue {
    fn from_toml(value: toml::Value) -> Option<Self> {
        Some(match value {
            toml::Value::Array(values) => Self::List(values.into_iter().map(single).collect::<Option<_>>()?),
            toml::Value::Table(table) => {
                let pairs = table.into_iter().map(|(key, value)| Some((key, single(value)?)));
                Self::Map(pairs.collect::<Option<_>>()?)
            }
            value => Self::Single(single(value)?),
        })
    }
}

fn single(value: toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(value) => Some(value.to_string()),
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => None,
    }
}
