//! The kubelet's configuration file, `KubeletConfiguration` of `kubelet.config.k8s.io/v1beta1`.
//!
//! Decoding is strict as in the kubelet: an unknown or repeated field is an error. A field without an effect may only
//! have its default value. Files of a directory may be merged into the file.

mod documents;
mod fields;
mod machine;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde_yaml_ng::{Mapping, Value};

use super::file::{File, FileValue};
use super::nearest;
use documents::Document;
pub(super) use documents::in_directory;
use fields::{FIELDS, Support, advice};
use machine::Demand;

const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";

/// Table of the node's settings.
const NODE: &str = "node";

/// Text of a file, and the name of the file in errors.
pub(super) struct Text {
    pub(super) place: String,
    pub(super) text: String,
}

/// Parser of one file and of the files that are merged into it.
struct Parser<'a> {
    documents: &'a [Document],
    file: File,
    /// `address` and `port`, which are one setting here: `kubelet-listen`.
    listen: (Option<String>, Option<String>),
}

/// Parses a `KubeletConfiguration`, and merges further files into it. Problems of single fields are collected in the
/// result.
pub(super) fn parse(texts: &[Text]) -> anyhow::Result<File> {
    let documents = texts.iter().map(document).collect::<anyhow::Result<Vec<_>>>()?;
    let mut parser = Parser { documents: &documents, file: File::default(), listen: (None, None) };
    for (key, value) in &documents::merged(&documents) {
        match key.as_str() {
            Some("apiVersion" | "kind") => {}
            Some(key) => parser.field(key, value),
            None => parser.problem("", "a key is not a string"),
        }
    }
    parser.add_listen();
    Ok(parser.file)
}

fn document(text: &Text) -> anyhow::Result<Document> {
    let Text { place, text } = text;
    let fields: Mapping = serde_yaml_ng::from_str(text).with_context(|| format!("cannot parse {place}"))?;
    let is = |key: &str, expected: &str| fields.get(key).and_then(Value::as_str) == Some(expected);
    anyhow::ensure!(
        is("apiVersion", API_VERSION) && is("kind", "KubeletConfiguration"),
        "{place} is not a KubeletConfiguration of {API_VERSION}; other settings are read from TOML files"
    );
    Ok(Document { place: place.clone(), fields })
}

// === impl Parser ===

impl Parser<'_> {
    fn problem(&mut self, path: &str, problem: &str) {
        let place = self.place(path);
        self.file.problems.push(format!("{place}: {problem}"));
    }

    /// The name in errors of the field at this path: the file that has the field, and the path.
    fn place(&self, path: &str) -> String {
        format!("{} {path}", documents::place(self.documents, path))
    }

    /// Adds the field with this path, or the fields below it.
    fn field(&mut self, path: &str, value: &Value) {
        if value.is_null() {
            return;
        }
        if let Some(field) = FIELDS.iter().find(|field| field.path == path) {
            if field.zero_is_unset && is_zero(value) {
                return;
            }
            return match field.support {
                Support::Setting(table, name) => match invalid(path, value) {
                    Some(problem) => self.problem(path, problem),
                    None => self.setting(path, table, name, value),
                },
                Support::Address => self.listen.0 = text(value),
                Support::Port => self.listen.1 = text(value),
                Support::Taints => self.taints(path, value),
                Support::ReservedMemory => self.reserved_memory(path, value),
                Support::ShutdownPeriods => self.shutdown_periods(path, value),
                Support::Headers => self.headers(path, value),
                Support::Verbosity => self.verbosity(path, value),
                Support::Demand(demand) => self.demand(path, value, demand),
                Support::AtLeast(least) => self.at_least(path, value, least),
                Support::Only(allowed) => self.only(path, value, allowed),
            };
        }
        // Fields inside the value of a known field are not checked here. For example, `evictionHard` is one field.
        let is_parent = FIELDS
            .iter()
            .any(|field| field.path.strip_prefix(path).is_some_and(|below| below.starts_with('.')));
        match value.as_mapping().filter(|_| is_parent) {
            Some(fields) => {
                for (key, value) in fields {
                    self.field(&format!("{path}.{}", key.as_str().unwrap_or_default()), value);
                }
            }
            None if is_parent => self.problem(path, "expected an object"),
            None => {
                let hint = nearest::of(path, FIELDS.iter().map(|field| field.path));
                let hint = hint.map(|known| format!("; did you mean {known}?")).unwrap_or_default();
                self.problem(path, &format!("unknown field{hint}"));
            }
        }
    }

    fn setting(&mut self, path: &str, table: &'static str, name: &'static str, value: &Value) {
        match file_value(value) {
            Some(value) => {
                let place = self.place(path);
                self.file.insert(table, name, value, place);
            }
            None => self.problem(path, "expected a single value, an array or an object of single values"),
        }
    }

    fn only(&mut self, path: &str, value: &Value, allowed: &[&str]) {
        let is_allowed = match value {
            Value::Sequence(values) => {
                let texts: Option<Vec<String>> = values.iter().map(text).collect();
                texts.is_some_and(|texts| allowed.contains(&texts.join(",").as_str()))
            }
            Value::Mapping(pairs) => pairs.is_empty(),
            value => {
                text(value).is_some_and(|text| allowed.iter().any(|allowed| are_equal_values(&text, allowed)))
            }
        };
        if !is_allowed {
            let default = match allowed {
                [] | [""] => "leave it unset".to_owned(),
                allowed => format!("the only value is {}", allowed.join(" or ")),
            };
            self.unsupported(path, &default);
        }
    }

    fn at_least(&mut self, path: &str, value: &Value, least: &str) {
        if !text(value).is_some_and(|text| reaches(&text, least)) {
            self.unsupported(path, &format!("the minimum is {least}"));
        }
    }

    /// Refuses the value of a field without an effect. `accepted` describes the accepted values.
    fn unsupported(&mut self, path: &str, accepted: &str) {
        let advice = advice(path).map(|advice| format!("; {advice}")).unwrap_or_default();
        self.problem(path, &format!("this field is not supported; {accepted}{advice}"));
    }

    /// Refuses the value `true` if the machine does not have the property.
    fn demand(&mut self, path: &str, value: &Value, demand: Demand) {
        match value {
            Value::Bool(true) => {
                if let Some(why) = demand.unmet(Path::new("/proc"), Path::new("/sys/fs/cgroup")) {
                    self.problem(path, &why);
                }
            }
            Value::Bool(false) => {}
            _ => self.problem(path, "expected true or false"),
        }
    }

    /// Converts the verbosity of klog to a level of the log. Kubernetes logs debug messages at verbosity 4, and
    /// requests at verbosity 6.
    fn verbosity(&mut self, path: &str, value: &Value) {
        let level = match text(value).and_then(|text| text.parse::<u32>().ok()) {
            Some(0..=3) => "info",
            Some(4..=5) => "debug",
            Some(_) => "trace",
            None => return self.problem(path, "expected a whole number that is not negative"),
        };
        let place = self.place(path);
        self.file.insert("", "log-level", FileValue::Single(level.to_owned()), place);
    }

    /// Converts taints, which are objects in this file, to the texts of the setting: the form of the kubelet's flag.
    fn taints(&mut self, path: &str, value: &Value) {
        let taint = |value: &Value| {
            let fields = value.as_mapping()?;
            let known = fields.keys().all(|key| matches!(key.as_str(), Some("key" | "value" | "effect")));
            let of = |name: &str| fields.get(name).map_or(Some(String::new()), text);
            known.then_some(())?;
            Some(format!("{}={}:{}", of("key")?, of("value")?, of("effect")?))
        };
        let taints = value.as_sequence().and_then(|values| values.iter().map(taint).collect::<Option<_>>());
        let Some(taints) = taints else {
            return self.problem(path, "expected an array of taints with key, value and effect");
        };
        let place = self.place(path);
        self.file.insert(NODE, "register-with-taints", FileValue::List(taints), place);
    }

    /// Converts reservations, which are objects in this file, to texts in the form of the kubelet's flag.
    fn reserved_memory(&mut self, path: &str, value: &Value) {
        let reservation = |value: &Value| {
            let fields = value.as_mapping()?;
            let known = fields.keys().all(|key| matches!(key.as_str(), Some("numaNode" | "limits")));
            let pair = |(name, size): (&Value, &Value)| Some(format!("{}={}", text(name)?, text(size)?));
            let limits: Option<Vec<String>> = fields.get("limits")?.as_mapping()?.iter().map(pair).collect();
            let node = fields.get("numaNode").map_or(Some("0".to_owned()), text)?;
            known.then_some(())?;
            Some(format!("{node}:{}", limits?.join(",")))
        };
        let all =
            value.as_sequence().and_then(|values| values.iter().map(reservation).collect::<Option<_>>());
        let Some(all) = all else {
            return self.problem(path, "expected an array of objects with numaNode and limits");
        };
        let place = self.place(path);
        self.file.insert(NODE, "reserved-memory", FileValue::List(all), place);
    }

    /// Converts periods, which are objects in this file, to pairs of a priority and its seconds.
    fn shutdown_periods(&mut self, path: &str, value: &Value) {
        let period = |value: &Value| {
            let fields = value.as_mapping()?;
            let is_known =
                |key: &Value| matches!(key.as_str(), Some("priority" | "shutdownGracePeriodSeconds"));
            fields.keys().all(is_known).then_some(())?;
            let of = |name: &str| fields.get(name).map_or(Some("0".to_owned()), text);
            Some((of("priority")?, of("shutdownGracePeriodSeconds")?))
        };
        let all = value.as_sequence().and_then(|values| values.iter().map(period).collect::<Option<_>>());
        let Some(all) = all else {
            let expected = "expected an array of objects with priority and shutdownGracePeriodSeconds";
            return self.problem(path, expected);
        };
        let place = self.place(path);
        self.file.insert(NODE, "shutdown-grace-period-by-pod-priority", FileValue::Map(all), place);
    }

    /// Converts headers, which are arrays of values by name in this file, to texts in the form of the kubelet's flag.
    fn headers(&mut self, path: &str, value: &Value) {
        let header = |(name, values): (&Value, &Value)| {
            let name = name.as_str()?;
            let header = |value: &Value| Some(format!("{name}:{}", value.as_str()?));
            values.as_sequence()?.iter().map(header).collect::<Option<Vec<_>>>()
        };
        let all = value.as_mapping().and_then(|all| all.iter().map(header).collect::<Option<Vec<_>>>());
        let Some(all) = all else {
            return self.problem(path, "expected an object with an array of values for each header");
        };
        let place = self.place(path);
        self.file.insert(NODE, "manifest-url-header", FileValue::List(all.concat()), place);
    }

    fn add_listen(&mut self) {
        let (address, port) = match std::mem::take(&mut self.listen) {
            (None, None) => return,
            (address, port) => {
                (address.unwrap_or_else(|| "0.0.0.0".to_owned()), port.unwrap_or_else(|| "10250".to_owned()))
            }
        };
        let address = if address.contains(':') { format!("[{address}]") } else { address };
        let value = FileValue::Single(format!("{address}:{port}"));
        let place = self.place("address and port");
        self.file.insert(NODE, "kubelet-listen", value, place);
    }
}

/// The reason why the kubelet refuses a value that the setting accepts. `None` if the kubelet accepts the value.
/// Source: `ValidateKubeletConfiguration` of upstream's `pkg/kubelet/apis/config/validation`.
fn invalid(path: &str, value: &Value) -> Option<&'static str> {
    let text = text(value)?;
    match path {
        "containerLogMaxFiles" if text.parse::<i64>().is_ok_and(|count| count <= 1) => {
            Some("the number must be greater than 1")
        }
        "podLogsDir" if !text.is_ascii() => Some("the path may only have ASCII characters"),
        "podLogsDir" if !text.starts_with('/') => Some("the path must be absolute"),
        "podLogsDir" if text.split('/').skip(1).any(|name| matches!(name, "" | "." | "..")) => {
            Some("the path must not have empty names, '.' or '..'")
        }
        _ => None,
    }
}

/// Whether this is a zero value. The kubelet replaces a zero value by the default if the field is not a pointer.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            text.is_empty() || coracle_agent::duration(text).is_some_and(|duration| duration.is_zero())
        }
        Value::Sequence(values) => values.is_empty(),
        Value::Mapping(pairs) => pairs.is_empty(),
        Value::Tagged(_) => false,
    }
}

/// Whether the values are equal as text or as durations: `1m` and `60s` are the same value.
fn are_equal_values(text: &str, other: &str) -> bool {
    let duration = coracle_agent::duration(text);
    text == other || (duration.is_some() && duration == coracle_agent::duration(other))
}

/// Whether a number or a duration is not less than `least`.
fn reaches(text: &str, least: &str) -> bool {
    match (text.parse::<i64>(), least.parse::<i64>()) {
        (Ok(number), Ok(least)) => number >= least,
        _ => coracle_agent::duration(text) >= coracle_agent::duration(least),
    }
}

fn file_value(value: &Value) -> Option<FileValue> {
    Some(match value {
        Value::Sequence(values) => FileValue::List(values.iter().map(text).collect::<Option<_>>()?),
        Value::Mapping(pairs) => {
            let pair = |(key, value): (&Value, &Value)| Some((text(key)?, text(value)?));
            FileValue::Map(pairs.iter().map(pair).collect::<Option<BTreeMap<_, _>>>()?)
        }
        value => FileValue::Single(text(value)?),
    })
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Null | Value::Sequence(_) | Value::Mapping(_) | Value::Tagged(_) => None,
    }
}

/// The fields for the reference page.
#[cfg(test)]
pub(super) struct Reference {
    /// Fields with an effect, and their settings.
    pub(super) honoured: Vec<(&'static str, String)>,
    /// Fields without an effect, and their accepted values.
    pub(super) without_effect: Vec<(&'static str, String)>,
}

#[cfg(test)]
pub(super) fn reference() -> Reference {
    let mut reference = Reference { honoured: Vec::new(), without_effect: Vec::new() };
    for field in FIELDS {
        let setting = match field.support {
            Support::Setting(_, name) => name,
            Support::Address | Support::Port => "kubelet-listen",
            Support::Taints => "register-with-taints",
            Support::ReservedMemory => "reserved-memory",
            Support::ShutdownPeriods => "shutdown-grace-period-by-pod-priority",
            Support::Headers => "manifest-url-header",
            Support::Verbosity => "log-level",
            Support::Demand(demand) => {
                reference.without_effect.push((field.path, demand.accepted().to_owned()));
                continue;
            }
            Support::AtLeast(least) => {
                reference.without_effect.push((field.path, format!("unset, `{least}` or more")));
                continue;
            }
            Support::Only(allowed) => {
                let values: Vec<_> = allowed.iter().map(|value| format!("`{value}`")).collect();
                let unset = if values.is_empty() {
                    "unset".to_owned()
                } else {
                    format!("unset, {}", values.join(", "))
                };
                reference.without_effect.push((field.path, unset));
                continue;
            }
        };
        reference.honoured.push((field.path, setting.to_owned()));
    }
    reference
}

#[cfg(test)]
mod tests;
