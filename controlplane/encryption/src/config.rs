//! The encryption configuration file: `EncryptionConfiguration` of `apiserver.config.k8s.io/v1`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use nix::fcntl::OFlag;
use serde::Deserialize;

use super::{
    Pattern, Rule,
    kms::{Kms, KmsSettings},
    provider::{Provider, Scheme},
};
use coracle_sealing::{Error, private_file};

/// Maximum bytes of the file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Default timeout of a plugin, as upstream.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum timeout of a plugin, in seconds.
const MAX_TIMEOUT_SECONDS: u64 = 60;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    resources: Vec<Resources>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resources {
    resources: Vec<String>,
    providers: Vec<Entry>,
}

/// One provider. Exactly one field is set.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Entry {
    identity: Option<Empty>,
    aescbc: Option<Keys>,
    aesgcm: Option<Keys>,
    secretbox: Option<Keys>,
    kms: Option<KmsEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Empty {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    keys: Vec<KeyEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyEntry {
    name: String,
    secret: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct KmsEntry {
    api_version: String,
    name: String,
    endpoint: String,
    timeout: Option<String>,
}

/// Parses the file. Plugins of `former` with the same settings are reused.
pub(super) fn load(path: &Path, former: &[Rule]) -> Result<Vec<Rule>, Error> {
    let text = private_file::read(path, OFlag::empty(), MAX_FILE_BYTES)?;
    let invalid = |reason: String| Error::Configuration { path: path.to_owned(), reason };
    let file: File = serde_yaml_ng::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    if file.api_version != "apiserver.config.k8s.io/v1" || file.kind != "EncryptionConfiguration" {
        return Err(invalid(format!(
            "expected an EncryptionConfiguration of apiserver.config.k8s.io/v1, found {:?} of {:?}",
            file.kind, file.api_version
        )));
    }
    if file.resources.is_empty() {
        return Err(invalid("resources: at least one item is required".to_owned()));
    }
    let mut known: Vec<Arc<Provider>> =
        former.iter().flat_map(|rule| rule.providers.iter().cloned()).collect();
    let mut names = BTreeSet::new();
    let mut rules = Vec::new();
    for (index, resources) in file.resources.into_iter().enumerate() {
        let at = |reason: String| invalid(format!("resources[{index}].{reason}"));
        let patterns: Result<Vec<_>, _> = resources.resources.iter().map(|one| Pattern::parse(one)).collect();
        let patterns = patterns.map_err(at)?;
        if patterns.is_empty() || resources.providers.is_empty() {
            return Err(at("resources and providers: at least one of each is required".to_owned()));
        }
        let mut providers = Vec::new();
        for (index, entry) in resources.providers.into_iter().enumerate() {
            let at = |reason: String| at(format!("providers[{index}].{reason}"));
            let provider = match entry.read().map_err(at)? {
                Parsed::Ready(provider) => Arc::new(provider),
                Parsed::Kms(settings) => kms(settings, &mut known, &mut names, at)?,
            };
            providers.push(provider);
        }
        rules.push(Rule { resources: patterns, providers });
    }
    Ok(rules)
}

/// Returns the plugin with these settings, or starts it. Resources share a plugin, and a reload reuses it. `known` has
/// the providers of the former file and of the earlier entries. `names` has the names of the earlier plugins.
fn kms(
    settings: KmsSettings,
    known: &mut Vec<Arc<Provider>>,
    names: &mut BTreeSet<String>,
    at: impl Fn(String) -> Error,
) -> Result<Arc<Provider>, Error> {
    let same = known.iter().find(|one| matches!(&***one, Provider::Kms(kms) if *kms.settings() == settings));
    if let Some(same) = same {
        names.insert(settings.name);
        return Ok(same.clone());
    }
    if !names.insert(settings.name.clone()) {
        return Err(at(format!(
            "kms.name: {:?} occurs twice with different settings; entries of one name must be equal",
            settings.name
        )));
    }
    let started = Arc::new(Provider::Kms(Kms::start(settings)?));
    known.push(started.clone());
    Ok(started)
}

/// An entry of the file: a complete provider, or the settings of a plugin.
enum Parsed {
    Ready(Provider),
    Kms(KmsSettings),
}

// === impl Entry ===

impl Entry {
    fn read(self) -> Result<Parsed, String> {
        let keyed = [
            (Scheme::AesCbc, self.aescbc),
            (Scheme::AesGcm, self.aesgcm),
            (Scheme::Secretbox, self.secretbox),
        ];
        let mut found = Vec::new();
        for (scheme, keys) in keyed {
            if let Some(keys) = keys {
                found.push(Parsed::Ready(keys.read(scheme)?));
            }
        }
        if self.identity.is_some() {
            found.push(Parsed::Ready(Provider::Identity));
        }
        if let Some(kms) = self.kms {
            found.push(Parsed::Kms(kms.read()?));
        }
        let only = found.pop().filter(|_| found.is_empty());
        only.ok_or_else(|| "must have exactly one of identity, aescbc, aesgcm, secretbox and kms".to_owned())
    }
}

// === impl Keys ===

impl Keys {
    fn read(self, scheme: Scheme) -> Result<Provider, String> {
        let (mut names, mut keys) = (BTreeSet::new(), Vec::new());
        for (index, entry) in self.keys.into_iter().enumerate() {
            let field = format!("{}.keys[{index}]", scheme.name());
            if entry.name.is_empty() || entry.name.contains(':') || !names.insert(entry.name.clone()) {
                return Err(format!(
                    "{field}.name: {:?} is empty, contains a colon or is a duplicate",
                    entry.name
                ));
            }
            // The error must not contain the secret.
            let bytes = BASE64_STANDARD.decode(entry.secret.trim());
            let bytes = bytes.map_err(|_error| format!("{field}.secret: is not base64"))?;
            let key = scheme.key(entry.name, &bytes);
            keys.push(key.map_err(|reason| format!("{field}.secret: {reason}"))?);
        }
        match keys.is_empty() {
            true => Err(format!("{}.keys: at least one key is required", scheme.name())),
            false => Ok(Provider::Keys(scheme, keys)),
        }
    }
}

// === impl KmsEntry ===

impl KmsEntry {
    fn read(self) -> Result<KmsSettings, String> {
        if self.api_version != "v2" {
            return Err(format!(
                "kms.apiVersion: {:?} must be v2; v1 is deprecated upstream",
                self.api_version
            ));
        }
        if self.name.is_empty() || self.name.contains(':') {
            return Err(format!("kms.name: {:?} must not be empty and must not contain a colon", self.name));
        }
        let socket =
            self.endpoint.strip_prefix("unix://").map(PathBuf::from).filter(|path| path.is_absolute());
        let socket =
            socket.ok_or_else(|| format!("kms.endpoint: {:?} must be unix:///path", self.endpoint))?;
        let timeout = self.timeout.map_or(Ok(DEFAULT_TIMEOUT), |text| parse_timeout(&text))?;
        Ok(KmsSettings { name: self.name, socket, timeout })
    }
}

/// Parses a timeout such as `3s`, `500ms` or `1m`.
fn parse_timeout(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000)];
    let parsed = units.iter().find_map(|(unit, scale)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*scale)
    });
    match parsed {
        Some(millis) if millis > 0 && millis <= MAX_TIMEOUT_SECONDS * 1000 => {
            Ok(Duration::from_millis(millis))
        }
        _ => Err(format!("kms.timeout: {text:?} must be a duration such as 3s, at most 1m")),
    }
}

// === impl Pattern ===

impl Pattern {
    fn parse(text: &str) -> Result<Self, String> {
        let (plural, group) = text.split_once('.').unwrap_or((text, ""));
        match (plural, group) {
            ("*", "*") => Ok(Self::All),
            ("*", group) if text.contains('.') && !group.contains('*') => Ok(Self::Group(group.to_owned())),
            ("", _) | ("*", _) => {
                Err(format!("resources: {text:?} is not a resource; use *.* for all resources"))
            }
            (plural, group) if plural.contains(['*', '/']) || group.contains('*') => {
                Err(format!("resources: {text:?} has a wildcard that is not supported"))
            }
            (plural, group) if plural.to_lowercase() == plural => {
                Ok(Self::One { plural: plural.to_owned(), group: group.to_owned() })
            }
            _ => Err(format!("resources: {text:?} must be in lower case")),
        }
    }
}
