//! The field `extenders` of the configuration.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use serde::Deserialize;

use super::SchedulerConfig;
use crate::extender::{Extender, Tls, client};

/// The timeout of an extender whose `httpTimeout` is absent or 0, as upstream.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FileExtender {
    url_prefix: String,
    filter_verb: String,
    preempt_verb: String,
    prioritize_verb: String,
    weight: i64,
    bind_verb: String,
    /// The older file format `Policy` has the spelling `enableHttps`.
    #[serde(rename = "enableHTTPS", alias = "enableHttps")]
    enable_https: bool,
    tls_config: FileTls,
    http_timeout: Option<Timeout>,
    node_cache_capable: bool,
    managed_resources: Vec<ManagedResource>,
    ignorable: bool,
}

/// A duration: a text such as `5s`, or a number of nanoseconds in the file format `Policy`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Timeout {
    Text(kube::core::Duration),
    Nanoseconds(i64),
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct FileTls {
    insecure: bool,
    server_name: Option<String>,
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    cert_data: Option<String>,
    key_data: Option<String>,
    ca_data: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ManagedResource {
    name: String,
    #[serde(default)]
    ignored_by_scheduler: bool,
}

/// Adds the extenders to a configuration. The error names the invalid field.
pub(super) fn apply(files: Vec<FileExtender>, config: &mut SchedulerConfig) -> Result<(), String> {
    let mut managed = BTreeSet::new();
    for (place, file) in files.into_iter().enumerate() {
        let invalid = |reason: String| format!("extenders[{place}]: {reason}");
        for resource in &file.managed_resources {
            let name = &resource.name;
            if !is_extended(name) {
                return Err(invalid(format!("managedResources: {name:?} is not an extended resource")));
            }
            if !managed.insert(name.clone()) {
                return Err(invalid(format!("managedResources: {name:?} is listed more than once")));
            }
            if resource.ignored_by_scheduler {
                for profile in &mut config.profiles {
                    profile.fit.ignored.insert(name.clone());
                }
            }
        }
        let extender = extender(file).map_err(invalid)?;
        client::check(&extender).map_err(invalid)?;
        if extender.bind.is_some() && config.extenders.iter().any(|other| other.bind.is_some()) {
            return Err(invalid("bindVerb: only one extender can bind pods".to_owned()));
        }
        config.extenders.push(extender);
    }
    Ok(())
}

/// Whether a resource is an extended resource: its name has a domain other than `kubernetes.io` and its subdomains.
fn is_extended(name: &str) -> bool {
    let domain = name.split_once('/').filter(|(domain, name)| !domain.is_empty() && !name.is_empty());
    domain.is_some_and(|(domain, _)| domain != "kubernetes.io" && !domain.ends_with(".kubernetes.io"))
}

fn extender(file: FileExtender) -> Result<Extender, String> {
    let verb = |verb: String| Some(verb).filter(|verb| !verb.is_empty());
    let prioritize = verb(file.prioritize_verb);
    if prioritize.is_some() && file.weight <= 0 {
        return Err("weight: must be above 0 if prioritizeVerb is set".to_owned());
    }
    let timeout = match file.http_timeout {
        None => DEFAULT_TIMEOUT,
        Some(timeout) => {
            let timeout = timeout.duration().ok_or("httpTimeout: must not be negative")?;
            Some(timeout).filter(|timeout| !timeout.is_zero()).unwrap_or(DEFAULT_TIMEOUT)
        }
    };
    Ok(Extender {
        url: file.url_prefix,
        filter: verb(file.filter_verb),
        prioritize,
        preempt: verb(file.preempt_verb),
        bind: verb(file.bind_verb),
        weight: file.weight,
        tls: tls(file.tls_config, file.enable_https)?,
        timeout,
        knows_nodes: file.node_cache_capable,
        resources: file.managed_resources.into_iter().map(|resource| resource.name).collect(),
        ignorable: file.ignorable,
    })
}

impl Timeout {
    /// The duration. `None` if it is negative.
    fn duration(self) -> Option<Duration> {
        match self {
            Self::Text(text) => (!text.is_negative()).then(|| text.into()),
            Self::Nanoseconds(number) => u64::try_from(number).ok().map(Duration::from_nanos),
        }
    }
}

fn tls(file: FileTls, enable_https: bool) -> Result<Tls, String> {
    let authorities = pem("ca", file.ca_data, file.ca_file.as_deref())?;
    if file.insecure && authorities.is_some() {
        return Err("tlsConfig: insecure is not allowed with caFile or caData".to_owned());
    }
    let certificate = pem("cert", file.cert_data, file.cert_file.as_deref())?;
    let key = pem("key", file.key_data, file.key_file.as_deref())?;
    let identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err("tlsConfig: a certificate needs its key, and a key its certificate".to_owned()),
    };
    // As in upstream, enableHTTPS without authorities accepts every certificate.
    let insecure = file.insecure || (enable_https && authorities.is_none());
    let server_name = file.server_name.filter(|name| !name.is_empty());
    Ok(Tls { insecure, server_name, authorities, identity })
}

/// The PEM text of a field: its data, or the content of its file.
fn pem(field: &str, data: Option<String>, file: Option<&Path>) -> Result<Option<Vec<u8>>, String> {
    if let Some(data) = data.filter(|data| !data.is_empty()) {
        let decoded = base64::engine::general_purpose::STANDARD.decode(data);
        return decoded.map(Some).map_err(|error| format!("tlsConfig.{field}Data: {error}"));
    }
    let Some(file) = file.filter(|file| !file.as_os_str().is_empty()) else { return Ok(None) };
    let read = std::fs::read(file).map(Some);
    read.map_err(|error| format!("tlsConfig.{field}File: cannot read {}: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(extenders: &str) -> Result<SchedulerConfig, String> {
        let mut config = SchedulerConfig::default();
        apply(serde_yaml_ng::from_str(extenders).map_err(|error| error.to_string())?, &mut config)?;
        Ok(config)
    }

    #[test]
    fn an_extender_has_verbs_resources_and_a_timeout() {
        let mut config = with(
            "
- urlPrefix: http://127.0.0.1:8000/scheduler/
  filterVerb: filter
  prioritizeVerb: score
  weight: 3
  httpTimeout: 1m30s
  nodeCacheCapable: true
  managedResources: [{name: x.io/gpu, ignoredByScheduler: true}, {name: x.io/disk}]
- {urlPrefix: 'https://x.example', bindVerb: bind, enableHTTPS: true, ignorable: true}
",
        )
        .unwrap();
        let second = config.extenders.pop().unwrap();
        assert!(second.tls.insecure && second.ignorable && !second.chooses());
        assert_eq!((second.bind.as_deref(), second.timeout), (Some("bind"), DEFAULT_TIMEOUT));
        let first = &config.extenders[0];
        assert_eq!((first.weight, first.timeout, first.knows_nodes), (3, Duration::from_secs(90), true));
        assert_eq!(first.resources, ["x.io/disk".to_owned(), "x.io/gpu".to_owned()].into());
        let fit = &config.profiles[0].fit;
        assert!(fit.ignores("x.io/gpu") && !fit.ignores("x.io/disk"));
    }

    #[test]
    fn invalid_extenders_are_refused() {
        let error = |text: &str| with(text).unwrap_err();
        assert!(error("[{urlPrefix: 'ftp://x'}]").contains("extenders[0]: urlPrefix"));
        assert!(error("[{urlPrefix: 'http://x', prioritizeVerb: p}]").contains("weight"));
        assert!(error("[{urlPrefix: 'http://x', managedResources: [{name: cpu}]}]").contains("extended"));
        let twice = "[{urlPrefix: 'http://x', bindVerb: b}, {urlPrefix: 'http://y', bindVerb: b}]";
        assert!(error(twice).contains("extenders[1]: bindVerb"));
        let resource = "managedResources: [{name: x.io/a}]";
        let same = format!("[{{urlPrefix: 'http://x', {resource}}}, {{urlPrefix: 'http://y', {resource}}}]");
        assert!(error(&same).contains("listed more than once"));
        assert!(error("[{urlPrefix: 'http://x', colour: red}]").contains("colour"));
        for timeout in ["-1s", "-1"] {
            let text = format!("[{{urlPrefix: 'http://x', httpTimeout: {timeout}}}]");
            assert_eq!(error(&text), "extenders[0]: httpTimeout: must not be negative");
        }
        assert!(error("[{urlPrefix: 'https://x', tlsConfig: {caFile: /missing/ca}}]").contains("caFile"));
        assert!(error("[{urlPrefix: 'https://x', tlsConfig: {certData: eA==}}]").contains("needs its key"));
        assert!(error("[{urlPrefix: 'https://x', tlsConfig: {caData: eA==}}]").contains("no certificate"));
    }
}
