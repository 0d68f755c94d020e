//! Configuration of the authorizers: the modes of `--authorization-mode`, or a file with an
//! `AuthorizationConfiguration`.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;

use super::{
    Authorizer, abac, component,
    condition::MatchConditions,
    constant, masters, node,
    rbac::{self, Policies},
    webhook::{Webhook, WebhookSettings},
};
use crate::bounded_file;

/// Maximum bytes of the file.
const LIMIT: u64 = 1 << 20;
/// Timeout of a call to a webhook that is configured by flags, as upstream.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum timeout of a call in a configuration file, as upstream.
const MAX_TIMEOUT: Duration = Duration::from_secs(30);

/// The settings of authorization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorizationConfig {
    /// Names of the authorizers in their order: `Node`, `RBAC`, `ABAC`, `Webhook`, `AlwaysAllow`, `AlwaysDeny`.
    pub modes: Vec<String>,
    /// Policy file of the mode `ABAC`.
    pub policy_file: Option<PathBuf>,
    /// Kubeconfig file of the mode `Webhook`.
    pub webhook_file: Option<PathBuf>,
    /// Time to live of cached decisions that allow a request.
    pub webhook_authorized: Duration,
    /// Time to live of cached decisions that do not allow a request.
    pub webhook_unauthorized: Duration,
    /// Version of the reviews: `v1` or `v1beta1`.
    pub webhook_version: String,
    /// Authorization configuration file, in upstream's format `AuthorizationConfiguration`. Replaces the modes.
    pub file: Option<PathBuf>,
}

impl Default for AuthorizationConfig {
    fn default() -> Self {
        Self {
            modes: vec!["Node".to_owned(), "RBAC".to_owned()],
            policy_file: None,
            webhook_file: None,
            webhook_authorized: Duration::from_secs(300),
            webhook_unauthorized: Duration::from_secs(30),
            webhook_version: "v1".to_owned(),
            file: None,
        }
    }
}

/// The authorizers of a chain, and whether one of them allows every request.
pub(super) struct Members {
    /// The index of the RBAC authorizer.
    policies: Arc<Policies>,
    pub(super) chain: Vec<Box<dyn Authorizer>>,
    pub(super) allows_all: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    api_version: String,
    kind: String,
    authorizers: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(rename = "type")]
    mode: String,
    name: String,
    webhook: Option<Hook>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Hook {
    #[serde(rename = "authorizedTTL")]
    authorized_ttl: Option<String>,
    #[serde(rename = "unauthorizedTTL")]
    unauthorized_ttl: Option<String>,
    #[serde(default = "default_true")]
    cache_authorized_requests: bool,
    #[serde(default = "default_true")]
    cache_unauthorized_requests: bool,
    timeout: String,
    subject_access_review_version: String,
    match_condition_subject_access_review_version: Option<String>,
    failure_policy: String,
    connection_info: Connection,
    #[serde(default)]
    match_conditions: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Connection {
    #[serde(rename = "type")]
    kind: String,
    kube_config_file: Option<PathBuf>,
}

fn default_true() -> bool {
    true
}

// === impl AuthorizationConfig ===

impl AuthorizationConfig {
    /// The text of the configuration file. `None` without a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read_file(&self) -> Result<Option<String>, String> {
        let read = |path: &PathBuf| bounded_file::read_text(path, LIMIT);
        self.file.as_ref().map(read).transpose().map_err(|reason| self.in_file(&reason))
    }

    /// An error in the configuration file.
    fn in_file(&self, reason: &str) -> String {
        let path = self.file.as_deref().unwrap_or(Path::new(""));
        format!("{}: {reason}", path.display())
    }

    /// Creates the authorizers of the chain. `text` is the configuration file, as [`Self::read_file`] returned it.
    ///
    /// # Errors
    /// A mode is unknown, or a file cannot be used.
    pub(super) fn members(&self, text: Option<&str>, policies: &Arc<Policies>) -> Result<Members, String> {
        let mut members = Members::new(policies.clone());
        match text {
            Some(text) => members.add_file(text).map_err(|reason| self.in_file(&reason))?,
            None => self.add_modes(&mut members)?,
        }
        Ok(members)
    }

    fn add_modes(&self, members: &mut Members) -> Result<(), String> {
        if self.modes.is_empty() {
            return Err("authorization-mode: at least one mode is required".to_owned());
        }
        let mut seen = BTreeSet::new();
        for mode in &self.modes {
            if !seen.insert(mode) {
                return Err(format!("authorization-mode: {mode:?} is given more than once"));
            }
            match mode.as_str() {
                "ABAC" => {
                    let path = self.policy_file.as_ref();
                    let path = path.ok_or("authorization-mode ABAC needs authorization-policy-file")?;
                    let read = abac::Abac::read(path);
                    let abac = read.map_err(|reason| format!("{}: {reason}", path.display()))?;
                    members.chain.push(Box::new(abac));
                }
                "Webhook" => {
                    let path = self.webhook_file.as_ref();
                    let path =
                        path.ok_or("authorization-mode Webhook needs authorization-webhook-config-file")?;
                    let made = Webhook::new(self.webhook(), path, MatchConditions::default());
                    let made = made.map_err(|reason| format!("{}: {reason}", path.display()))?;
                    members.chain.push(Box::new(made));
                }
                mode => members.add(mode).map_err(|reason| format!("authorization-mode: {reason}"))?,
            }
        }
        for (file, mode, flag) in [
            (&self.policy_file, "ABAC", "authorization-policy-file"),
            (&self.webhook_file, "Webhook", "authorization-webhook-config-file"),
        ] {
            if file.is_some() && !self.modes.iter().any(|one| one == mode) {
                return Err(format!("{flag} needs the authorization-mode {mode}"));
            }
        }
        Ok(())
    }

    fn webhook(&self) -> WebhookSettings {
        WebhookSettings {
            name: "default".to_owned(),
            timeout: TIMEOUT,
            authorized: self.webhook_authorized,
            unauthorized: self.webhook_unauthorized,
            version: self.webhook_version.clone(),
            denies_on_failure: false,
        }
    }
}

// === impl Members ===

impl Members {
    /// The authorizers that every chain begins with. `system:masters` can always repair the cluster.
    fn new(policies: Arc<Policies>) -> Self {
        let chain: Vec<Box<dyn Authorizer>> =
            vec![Box::new(masters::Masters), Box::new(component::Components)];
        Self { policies, chain, allows_all: false }
    }

    fn add(&mut self, mode: &str) -> Result<(), String> {
        self.chain.push(match mode {
            "Node" => Box::new(node::Nodes),
            "RBAC" => Box::new(rbac::Rbac(self.policies.clone())),
            "AlwaysAllow" => {
                self.allows_all = true;
                Box::new(constant::AlwaysAllow)
            }
            "AlwaysDeny" => Box::new(constant::AlwaysDeny),
            other => {
                return Err(format!(
                    "{other:?} must be Node, RBAC, ABAC, Webhook, AlwaysAllow or AlwaysDeny"
                ));
            }
        });
        Ok(())
    }

    fn add_file(&mut self, text: &str) -> Result<(), String> {
        let file: File = serde_yaml_ng::from_str(text).map_err(|error| error.to_string())?;
        let versions =
            ["v1", "v1beta1", "v1alpha1"].map(|version| format!("apiserver.config.k8s.io/{version}"));
        if !versions.contains(&file.api_version) || file.kind != "AuthorizationConfiguration" {
            return Err(format!(
                "expected an AuthorizationConfiguration of apiserver.config.k8s.io/v1, found {:?} of {:?}",
                file.kind, file.api_version
            ));
        }
        if file.authorizers.is_empty() {
            return Err("authorizers: at least one authorizer is required".to_owned());
        }
        let (mut names, mut modes) = (BTreeSet::new(), BTreeSet::new());
        for (index, entry) in file.authorizers.into_iter().enumerate() {
            let at = |reason: String| format!("authorizers[{index}].{reason}");
            if entry.name.is_empty() || !names.insert(entry.name.clone()) {
                return Err(at(format!("name: {:?} is empty or a duplicate", entry.name)));
            }
            if !coracle_values::names::dns1123_subdomain(&entry.name).is_empty() {
                return Err(at(format!("name: {:?} must be a DNS name in lower case", entry.name)));
            }
            if entry.mode != "Webhook" && !modes.insert(entry.mode.clone()) {
                return Err(at(format!("type: {:?} is a duplicate", entry.mode)));
            }
            match (entry.mode.as_str(), entry.webhook) {
                ("Webhook", Some(hook)) => {
                    self.chain.push(Box::new(webhook(entry.name, hook).map_err(at)?));
                }
                ("Webhook", None) => return Err(at("webhook: is required".to_owned())),
                (_, Some(_)) => return Err(at("webhook: is only for the type Webhook".to_owned())),
                ("ABAC", None) => {
                    return Err(at(
                        "type: ABAC is not supported in this file; use authorization-mode".to_owned()
                    ));
                }
                (mode, None) => self.add(mode).map_err(|reason| at(format!("type: {reason}")))?,
            }
        }
        Ok(())
    }
}

fn webhook(name: String, hook: Hook) -> Result<Webhook, String> {
    let timeout = duration("timeout", &hook.timeout)?;
    if timeout.is_zero() || timeout > MAX_TIMEOUT {
        return Err(format!("webhook.timeout: {:?} must be more than 0s and at most 30s", hook.timeout));
    }
    let ttl = |field, text: Option<String>, default, is_kept: bool| {
        let lasts = text.map_or(Ok(default), |text| duration(field, &text))?;
        if lasts.is_zero() {
            return Err(format!(
                "webhook.{field}: must be more than 0s; the fields cache*Requests disable the cache"
            ));
        }
        Ok::<_, String>(if is_kept { lasts } else { Duration::ZERO })
    };
    let authorized =
        ttl("authorizedTTL", hook.authorized_ttl, Duration::from_secs(300), hook.cache_authorized_requests)?;
    let unauthorized = ttl(
        "unauthorizedTTL",
        hook.unauthorized_ttl,
        Duration::from_secs(30),
        hook.cache_unauthorized_requests,
    )?;
    if !matches!(hook.subject_access_review_version.as_str(), "v1" | "v1beta1") {
        return Err("webhook.subjectAccessReviewVersion: must be v1 or v1beta1".to_owned());
    }
    let condition_version = hook.match_condition_subject_access_review_version.as_deref();
    match (hook.match_conditions.is_empty(), condition_version) {
        (_, Some("v1")) | (true, None) => {}
        _ => return Err("webhook.matchConditionSubjectAccessReviewVersion: must be v1".to_owned()),
    }
    let denies_on_failure = match hook.failure_policy.as_str() {
        "Deny" => true,
        "NoOpinion" => false,
        other => return Err(format!("webhook.failurePolicy: {other:?} must be NoOpinion or Deny")),
    };
    let file = match (hook.connection_info.kind.as_str(), hook.connection_info.kube_config_file) {
        ("KubeConfigFile", Some(file)) if file.is_absolute() => file,
        ("KubeConfigFile", _) => {
            return Err("webhook.connectionInfo.kubeConfigFile: must be an absolute path".to_owned());
        }
        (other, _) => return Err(format!("webhook.connectionInfo.type: {other:?} must be KubeConfigFile")),
    };
    let conditions = MatchConditions::compile(&hook.match_conditions.into());
    let conditions = conditions.map_err(|reason| format!("webhook.{reason}"))?;
    let version = hook.subject_access_review_version;
    let settings = WebhookSettings { name, timeout, authorized, unauthorized, version, denies_on_failure };
    Webhook::new(settings, &file, conditions)
        .map_err(|reason| format!("webhook.connectionInfo.kubeConfigFile: {reason}"))
}

/// A duration in the format of Go, for example `1m30s`.
fn duration(field: &str, text: &str) -> Result<Duration, String> {
    coracle_cel::duration::parse(text)
        .and_then(|nanoseconds| u64::try_from(nanoseconds).ok())
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("webhook.{field}: {text:?} is not a duration such as 30s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(authorizers: &str) -> Result<usize, String> {
        let mut members = Members::new(Arc::default());
        members.add_file(&format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers: {authorizers}\n"
        ))?;
        Ok(members.chain.len() - 2)
    }

    fn hook(from: &str, to: &str) -> Result<usize, String> {
        let hook = "{timeout: 3s, subjectAccessReviewVersion: v1, matchConditionSubjectAccessReviewVersion: v1, \
                    failurePolicy: Deny, connectionInfo: {type: KubeConfigFile, kubeConfigFile: /missing}, \
                    matchConditions: [{expression: \"request.user != 'a'\"}]}";
        file(&format!("[{{type: Webhook, name: w, webhook: {}}}]", hook.replace(from, to)))
    }

    #[test]
    fn a_file_names_authorizers_in_order() {
        assert_eq!(file("[{type: Node, name: node}, {type: RBAC, name: rbac}]"), Ok(2));
        // Only the kubeconfig file is invalid.
        assert!(hook("", "").unwrap_err().contains("kubeConfigFile: cannot read /missing"));
    }

    #[test]
    fn invalid_files_are_refused_with_their_field() {
        for (found, field) in [
            (file("[]"), "authorizers"),
            (file("[{type: Node, name: a}, {type: RBAC, name: a}]"), "authorizers[1].name"),
            (file("[{type: RBAC, name: a}, {type: RBAC, name: b}]"), "authorizers[1].type"),
            (file("[{type: Other, name: a}]"), "authorizers[0].type"),
            (file("[{type: RBAC, name: a, other: b}]"), "other"),
            (file("[{type: Webhook, name: a}]"), "authorizers[0].webhook"),
            (file("[{type: RBAC, name: A_b}]"), "authorizers[0].name"),
            (hook("timeout: 3s", "timeout: 3s, authorizedTTL: 0s"), "webhook.authorizedTTL"),
            (hook("timeout: 3s", "timeout: 3s, unauthorizedTTL: -1s"), "webhook.unauthorizedTTL"),
            (hook("timeout: 3s", "timeout: 31s"), "webhook.timeout"),
            (hook("timeout: 3s", "timeout: soon"), "webhook.timeout"),
            (hook("failurePolicy: Deny", "failurePolicy: Allow"), "webhook.failurePolicy"),
            (hook("Version: v1,", "Version: v2,"), "Version"),
            (hook("request.user != 'a'", "request.user"), "matchConditions[0].expression"),
            (hook("type: KubeConfigFile", "type: InClusterConfig"), "connectionInfo.type"),
        ] {
            let reason = found.unwrap_err();
            assert!(reason.contains(field), "{field}: {reason}");
        }
    }

    #[test]
    fn modes_need_their_files_and_occur_once() {
        let of = |modes: &[&str]| {
            let modes = modes.iter().map(|&mode| mode.to_owned()).collect();
            AuthorizationConfig { modes, ..AuthorizationConfig::default() }.members(None, &Arc::default())
        };
        assert_eq!(of(&["Node", "RBAC"]).map(|members| members.chain.len()), Ok(4));
        assert!(of(&["AlwaysAllow"]).unwrap().allows_all);
        for modes in [&["ABAC"][..], &["Webhook"], &["RBAC", "RBAC"], &["Other"], &[]] {
            assert!(of(modes).is_err(), "{modes:?}");
        }
    }
}
