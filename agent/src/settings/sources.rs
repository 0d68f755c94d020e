//! Sources of settings and their order: flag, environment variable, file, default.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::field::{DefaultValue, Field, PREFIX, ValueKind, variable};
use super::file::{File, FileValue};
use super::value::Value;

/// Variables with the prefix that are not settings: credentials of `coracle image pull`, and the fault points of tests.
const OTHER_VARIABLES: [&str; 2] = ["CORACLE_REGISTRY_CREDS", "CORACLE_FAULT"];

/// Settings with secrets. Their values are not shown.
const SECRETS: [&str; 1] = ["manifest-url-header"];
/// Settings with a URL, whose query may have a secret. The query is not shown.
const URLS: [&str; 1] = ["manifest-url"];
/// Text in place of a secret.
const HIDDEN: &str = "<hidden>";

/// The sources below the command line, and the problems found so far.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub(crate) environment: BTreeMap<String, String>,
    pub(crate) file: File,
    pub(crate) problems: Vec<String>,
    /// The texts of the resolved settings, by table and name. The text of an unset setting is empty.
    pub(crate) resolved: BTreeMap<&'static str, BTreeMap<&'static str, String>>,
}

/// Resolves the settings of one table.
pub(crate) struct Resolver<'a> {
    table: &'static str,
    flags: &'a BTreeMap<&'static str, Vec<String>>,
    sources: &'a mut Sources,
}

/// All settings that are wrong, each with its source.
#[derive(Debug, thiserror::Error)]
#[error("invalid configuration: {}", .0.join("; "))]
pub(crate) struct InvalidSettings(Vec<String>);

// === impl Sources ===

impl Sources {
    /// The variables of `environment` with the prefix. A value that is not UTF-8 is a problem.
    pub(crate) fn new(environment: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut sources = Self::default();
        for (name, value) in environment {
            let Ok(name) = name.into_string() else { continue };
            match value.into_string() {
                _ if !name.starts_with(PREFIX) => {}
                Ok(value) => drop(sources.environment.insert(name, value)),
                Err(_) => sources.problems.push(format!("environment variable {name} is not valid UTF-8")),
            }
        }
        sources
    }

    /// Returns the value of a result, or records its error as a problem.
    pub(crate) fn take<T>(&mut self, result: anyhow::Result<T>) -> Option<T> {
        result.map_err(|error| self.problems.push(format!("{error:#}"))).ok()
    }

    /// Fails with all problems, if there are any.
    pub(crate) fn check(&mut self) -> Result<(), InvalidSettings> {
        self.problems.append(&mut self.file.problems);
        // Two tables may have the same setting.
        let mut seen = std::collections::BTreeSet::new();
        self.problems.retain(|problem| seen.insert(problem.clone()));
        if self.problems.is_empty() {
            Ok(())
        } else {
            Err(InvalidSettings(std::mem::take(&mut self.problems)))
        }
    }

    /// Variables with the prefix that name no setting of the tables `known`.
    pub(crate) fn unknown_variables<'a>(
        &'a self,
        known: &'a [&'static [Field]],
    ) -> impl Iterator<Item = &'a str> {
        let is_known = |text: &str| {
            let mut names = known.iter().flat_map(|fields| fields.iter()).flat_map(Field::names);
            names.any(|name| variable(name) == text) || OTHER_VARIABLES.contains(&text)
        };
        self.environment.keys().map(String::as_str).filter(move |variable| !is_known(variable))
    }
}

// === impl Resolver ===

impl<'a> Resolver<'a> {
    /// Resolves the table with this key.
    pub(crate) fn new(
        table: &'static str,
        flags: &'a BTreeMap<&'static str, Vec<String>>,
        sources: &'a mut Sources,
    ) -> Self {
        Self { table, flags, sources }
    }

    /// The value of the first source that has a value. An invalid value is recorded as a problem, and the result is
    /// `None`.
    pub(crate) fn value<V: Value>(&mut self, field: &Field) -> Option<V> {
        let (texts, source) = match self.first_source(field) {
            Some((Ok(texts), source)) => (texts, source),
            Some((Err(problem), source)) => return self.record_problem(&source, &problem),
            None => match field.default {
                DefaultValue::Text(text) => (split(field.value_kind, [text]), "the default".to_owned()),
                DefaultValue::Unset(_) => {
                    self.record(field, &[]);
                    return V::unset();
                }
            },
        };
        self.record(field, &texts);
        match V::parse(&texts) {
            Ok(value) => Some(value),
            Err(problem) => self.record_problem(&format!("{source} {:?}", texts.join(",")), &problem),
        }
    }

    /// Records the texts of a setting as one text that a flag would accept.
    fn record(&mut self, field: &Field, texts: &[String]) {
        let separator = if field.value_kind == ValueKind::Entries { ";" } else { "," };
        let text = texts.join(separator);
        let text = match text.split_once('?') {
            _ if SECRETS.contains(&field.name) && !texts.is_empty() => HIDDEN.to_owned(),
            Some((start, _query)) if URLS.contains(&field.name) => format!("{start}?{HIDDEN}"),
            _ => text,
        };
        self.sources.resolved.entry(self.table).or_default().insert(field.name, text);
    }

    fn record_problem<V>(&mut self, source: &str, problem: &str) -> Option<V> {
        self.sources.problems.push(format!("{source}: {problem}"));
        None
    }

    /// The texts of the first source that gives the setting, and a description of the source.
    fn first_source(&mut self, field: &Field) -> Option<(Result<Vec<String>, String>, String)> {
        if let Some(texts) = self.flags.get(field.name) {
            return Some((Ok(split(field.value_kind, texts)), format!("flag --{}", field.name)));
        }
        for name in field.names() {
            let variable = variable(name);
            if let Some(text) = self.sources.environment.get(&variable) {
                return Some((
                    Ok(split(field.value_kind, [text])),
                    format!("environment variable {variable}"),
                ));
            }
        }
        self.sources
            .file
            .get(self.table, field.name)
            .map(|(value, place)| (texts(field.value_kind, value), place.to_owned()))
    }
}

/// Splits lists at commas. An empty text is an empty list.
fn split<T: AsRef<str>>(value_kind: ValueKind, texts: impl IntoIterator<Item = T>) -> Vec<String> {
    let texts = texts.into_iter();
    match value_kind {
        ValueKind::Single | ValueKind::Switch => texts.map(|text| text.as_ref().to_owned()).collect(),
        ValueKind::List | ValueKind::Map => parts(texts, ','),
        ValueKind::Entries => parts(texts, ';'),
    }
}

fn parts<T: AsRef<str>>(texts: impl Iterator<Item = T>, separator: char) -> Vec<String> {
    texts
        .flat_map(|text| {
            text.as_ref().split(separator).map(|part| part.trim().to_owned()).collect::<Vec<_>>()
        })
        .filter(|part| !part.is_empty())
        .collect()
}

fn texts(value_kind: ValueKind, value: &FileValue) -> Result<Vec<String>, String> {
    match (value_kind, value) {
        (ValueKind::Single | ValueKind::Switch, FileValue::Single(text)) => Ok(vec![text.clone()]),
        (ValueKind::List | ValueKind::Entries, FileValue::List(texts)) => Ok(texts.clone()),
        (ValueKind::Map, FileValue::Map(pairs)) => {
            Ok(pairs.iter().map(|(key, value)| format!("{key}={value}")).collect())
        }
        (ValueKind::Single | ValueKind::Switch, _) => Err("expected a single value".to_owned()),
        (ValueKind::List | ValueKind::Entries, _) => Err("expected an array of single values".to_owned()),
        (ValueKind::Map, _) => Err("expected a table of single values".to_owned()),
    }
}
