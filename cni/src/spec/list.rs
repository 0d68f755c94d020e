//! Network configuration lists: reading, choosing, and deriving the plugins' configurations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{Version, is_identifier};
use crate::error::Error;
use crate::plugin_kind::Kind;

/// A network: its plugins in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct List {
    pub(crate) name: String,
    pub(crate) version: Version,
    pub(crate) disable_check: bool,
    pub(crate) disable_gc: bool,
    pub(crate) plugins: Vec<Map<String, Value>>,
}

/// Values of capabilities by name, for the plugins that declare them.
pub(crate) type Capabilities = BTreeMap<String, Value>;

// === impl List ===

impl List {
    /// Reads the first list of the directory by name, as CNI runtimes do. `None` without a list. A malformed list is an
    /// error, because the next list would configure a network that the user did not intend.
    pub(crate) fn first_of(dir: &Path) -> Result<Option<Self>, Error> {
        let Some(path) = files(dir, &["conflist", "conf", "json"])?.into_iter().next() else {
            return Ok(None);
        };
        Self::read(&path).map(Some)
    }

    fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |reason: String| Error::Configuration { path: path.to_owned(), reason };
        let value = read_json(path)?;
        let mut list = Self::parse(value.clone()).map_err(wrong)?;
        let inlined_only = flag(&value, "loadOnlyInlinedPlugins").map_err(wrong)?;
        if value.get("plugins").is_none() && inlined_only {
            return Err(wrong("loadOnlyInlinedPlugins needs plugins".to_owned()));
        }
        let beside = path.parent().unwrap_or(path).join(&list.name);
        if value.get("type").is_none() && !inlined_only && beside.is_dir() {
            for path in files(&beside, &["conf"])? {
                let wrong = |reason: String| Error::Configuration { path: path.clone(), reason };
                list.plugins.push(plugin(read_json(&path)?).map_err(wrong)?);
            }
        }
        if list.plugins.is_empty() {
            return Err(wrong("it has no plugins".to_owned()));
        }
        Ok(list)
    }

    /// Parses a list, or a single plugin's configuration as a list of one.
    pub(crate) fn parse(value: Value) -> Result<Self, String> {
        let Some(map) = value.as_object() else { return Err("it is not a JSON object".to_owned()) };
        let name = match map.get("name") {
            Some(Value::String(name)) if is_identifier(name) => name.clone(),
            Some(name) => return Err(format!("name: {name} is not a valid network name")),
            None => return Err("name: is missing".to_owned()),
        };
        let plugins = match (map.get("plugins"), map.get("type")) {
            (Some(Value::Array(plugins)), _) => {
                plugins.iter().cloned().map(plugin).collect::<Result<_, _>>()?
            }
            (Some(_), _) => return Err("plugins: is not a list".to_owned()),
            (None, Some(_)) => vec![plugin(value.clone())?],
            (None, None) => Vec::new(),
        };
        Ok(Self {
            name,
            version: version(map)?,
            disable_check: flag(&value, "disableCheck")?,
            disable_gc: flag(&value, "disableGC")?,
            plugins,
        })
    }

    /// Whether all plugins are our own: they run in process, and their DEL works in any order.
    pub(crate) fn is_in_process(&self) -> bool {
        self.kinds().all(|kind| Kind::parse(kind).is_some())
    }

    /// Types of all plugins in order, each followed by its IPAM plugin.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = &str> {
        let ipam = |plugin: &'_ Map<String, Value>| {
            plugin.get("ipam").and_then(|ipam| ipam.get("type")).is_some_and(Value::is_string)
        };
        self.plugins.iter().flat_map(move |plugin| {
            let delegate = plugin.get("ipam").filter(|_| ipam(plugin)).and_then(|ipam| ipam["type"].as_str());
            [plugin.get("type").and_then(Value::as_str), delegate].into_iter().flatten()
        })
    }

    /// Whether any plugin declares this capability.
    pub(crate) fn declares(&self, capability: &str) -> bool {
        self.plugins.iter().any(|plugin| declares(plugin.get("capabilities"), capability))
    }

    /// The request configuration for one plugin (CNI specification, section 3, "Deriving request configuration").
    pub(crate) fn derive(
        &self,
        plugin: &Map<String, Value>,
        offered: &Capabilities,
        previous: Option<Value>,
    ) -> Map<String, Value> {
        let mut conf = plugin.clone();
        conf.insert("cniVersion".into(), json!(self.version.name()));
        conf.insert("name".into(), json!(self.name));
        let declared = conf.remove("capabilities");
        let declared_values = offered.iter().filter(|(name, _)| declares(declared.as_ref(), name));
        let declared_values: Map<String, Value> =
            declared_values.map(|(name, value)| (name.clone(), value.clone())).collect();
        if !declared_values.is_empty() {
            conf.insert("runtimeConfig".into(), declared_values.into());
        }
        if let Some(previous) = previous {
            conf.insert("prevResult".into(), previous);
        }
        conf
    }

    /// The list as one JSON value. [`parse`](Self::parse) reads it.
    pub(crate) fn to_value(&self) -> Value {
        json!({"cniVersion": self.version.name(), "name": self.name, "disableCheck": self.disable_check,
            "disableGC": self.disable_gc, "plugins": self.plugins})
    }
}

fn declares(declared: Option<&Value>, capability: &str) -> bool {
    declared.is_some_and(|declared| declared.get(capability) == Some(&Value::Bool(true)))
}

/// The highest offered version that this program supports.
fn version(map: &Map<String, Value>) -> Result<Version, String> {
    let mut offered = Vec::new();
    match map.get("cniVersion") {
        Some(Value::String(text)) => offered.push(text.as_str()),
        Some(other) => return Err(format!("cniVersion: {other} is not a string")),
        None => {}
    }
    match map.get("cniVersions") {
        Some(Value::Array(list)) => {
            for one in list {
                offered.push(one.as_str().ok_or_else(|| format!("cniVersions: {one} is not a string"))?);
            }
        }
        Some(other) => return Err(format!("cniVersions: {other} is not a list")),
        None => {}
    }
    if offered.is_empty() {
        return Err("cniVersion: is missing".to_owned());
    }
    let known = offered.iter().filter_map(|text| Version::parse(text)).max();
    known.ok_or_else(|| {
        let ours = Version::ALL.map(Version::name).join(", ");
        format!("cniVersion: {} is not supported, only {ours}", offered.join(", "))
    })
}

/// A plugin's configuration: an object with a type that is a valid file name.
fn plugin(value: Value) -> Result<Map<String, Value>, String> {
    let Value::Object(map) = value else {
        return Err("plugins: has a member that is not an object".to_owned());
    };
    file_name(map.get("type"), "type")?;
    match map.get("ipam") {
        None | Some(Value::Null) => {}
        Some(Value::Object(ipam)) if ipam.is_empty() => {}
        Some(ipam) => file_name(ipam.get("type"), "ipam.type")?,
    }
    if map.get("capabilities").is_some_and(|c| !c.is_object()) {
        return Err("capabilities: is not an object".to_owned());
    }
    Ok(map)
}

fn file_name(value: Option<&Value>, field: &str) -> Result<(), String> {
    let reserved = |name: &str| matches!(name, "" | "." | "..") || name.contains(['/', '\\', '\0']);
    match value {
        Some(Value::String(name)) if !reserved(name) => Ok(()),
        Some(other) => Err(format!("{field}: {other} is not a valid plugin name")),
        None => Err(format!("{field}: is missing")),
    }
}

/// A boolean, or its text as in older configurations. Absent and null are false.
fn flag(value: &Value, name: &str) -> Result<bool, String> {
    match value.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("true") => Ok(true),
        Some(Value::String(text)) if text.eq_ignore_ascii_case("false") => Ok(false),
        Some(other) => Err(format!("{name}: {other} is neither true nor false")),
    }
}

/// Files with one of the extensions, sorted by name. Empty if the directory does not exist.
fn files(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::File { action: "read", path: dir.to_owned(), source };
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if extensions.contains(&extension) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let text = std::fs::read(path);
    let text = text.map_err(|source| Error::File { action: "read", path: path.to_owned(), source })?;
    let wrong =
        |error: serde_json::Error| Error::Configuration { path: path.to_owned(), reason: error.to_string() };
    serde_json::from_slice(&text).map_err(wrong)
}

/// Parses any bytes: a list with a name and a version, or an error.
#[cfg(any(test, feature = "fuzzing"))]
pub fn fuzz(data: &[u8]) {
    let Ok(value) = serde_json::from_slice(data) else { return };
    if let Ok(list) = List::parse(value) {
        assert!(is_identifier(&list.name));
        assert_eq!(List::parse(list.to_value()).as_ref(), Ok(&list));
        for plugin in &list.plugins {
            let conf = list.derive(plugin, &Capabilities::new(), None);
            assert!(conf["type"].is_string() && !conf.contains_key("capabilities"));
        }
    }
}

#[cfg(test)]
mod tests;
