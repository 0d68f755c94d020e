//! The modes of impersonation: several constrained modes (KEP-5284), and the verb `impersonate`.
//!
//! A constrained mode needs two permissions: `impersonate:MODE` for the impersonated user, and
//! `impersonate-on:MODE:VERB` for the object of the request. Source: `mode.go` of
//! `k8s.io/apiserver/pkg/endpoints/filters/impersonation`.

use std::collections::BTreeMap;
use std::time::Instant;

use coracle_values::names::{dns1123_label, dns1123_subdomain};

use crate::{
    authn::User,
    authz::{AccessAttributes, Authorizers, Decision, Verdict},
    cache::Cache,
    error::Result,
    request::{Query, RequestInfo, ResourceInfo},
};

use super::counts::ImpersonationCounts;

const ACCOUNTS: &str = "system:serviceaccount:";
const NODES: &str = "system:node:";
/// Group of the resources `uids` and `userextras`, and of all resources in the constrained modes.
const GROUP: &str = "authentication.k8s.io";
/// Extra value with the node of a service account's token.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Extra value with the names of the caller's extra values, in the mode `associated-node`.
const ASSOCIATED_KEYS: &str = "authentication.kubernetes.io/associated-node-keys";
/// Minimum number of values for which the permission for all values (`*`) is checked first.
const MANY: usize = 4;

/// A way to impersonate a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// A service account impersonates the node of its pod.
    AssociatedNode,
    ArbitraryNode,
    ServiceAccount,
    /// Users other than nodes and service accounts, with groups, uid and extra values.
    UserInfo,
    /// The verb `impersonate`, for every request.
    Legacy,
}

/// The sender of the impersonation headers, its request, and the services that decide on its permissions.
pub(crate) struct Caller<'a> {
    pub(crate) authorizers: &'a Authorizers,
    pub(crate) cache: &'a Cache,
    pub(crate) user: &'a User,
    pub(crate) info: &'a RequestInfo,
    /// Whether the constrained modes exist.
    pub(crate) is_constrained: bool,
    pub(crate) counts: &'a ImpersonationCounts,
}

/// The checks of one mode.
struct Check<'a> {
    mode: Mode,
    caller: &'a Caller<'a>,
    /// The user whose permissions are checked.
    user: &'a User,
}

/// The target of an impersonation, as a resource of the API.
#[derive(Clone, Copy, Default)]
struct Target<'a> {
    group: &'a str,
    resource: &'a str,
    subresource: &'a str,
    namespace: &'a str,
    name: &'a str,
}

/// Namespace and name of a service account's user name. Any other text, for example with an additional colon, is an
/// ordinary user name. Source: `SplitUsername` of `k8s.io/apiserver/pkg/authentication/serviceaccount`.
pub(crate) fn account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix(ACCOUNTS)?.split_once(':')?;
    let is_valid = dns1123_label(namespace).is_empty() && dns1123_subdomain(name).is_empty();
    is_valid.then_some((namespace, name))
}

/// The node of a service account's token.
pub(crate) fn node_of_account(user: &User) -> Option<&str> {
    account(&user.name)?;
    match user.extra.get(NODE_NAME)?.as_slice() {
        [name] => Some(name),
        _ => None,
    }
}

/// The node name in the user name of a node. `None` for other users.
fn node_name(user: &str) -> Option<&str> {
    user.strip_prefix(NODES).filter(|name| dns1123_subdomain(name).is_empty())
}

// === impl Mode ===

impl Mode {
    /// All modes in the order in which they are tried.
    pub(super) const ALL: [Self; 5] =
        [Self::AssociatedNode, Self::ArbitraryNode, Self::ServiceAccount, Self::UserInfo, Self::Legacy];

    fn verb(self) -> &'static str {
        match self {
            Self::AssociatedNode => "impersonate:associated-node",
            Self::ArbitraryNode => "impersonate:arbitrary-node",
            Self::ServiceAccount => "impersonate:serviceaccount",
            Self::UserInfo => "impersonate:user-info",
            Self::Legacy => "impersonate",
        }
    }

    /// The name for metrics.
    pub(super) fn name(self) -> &'static str {
        self.verb().strip_prefix("impersonate:").unwrap_or("legacy")
    }

    /// The verb for audit events. Empty for the verb `impersonate`.
    pub(super) fn constraint(self) -> &'static str {
        if self.is_constrained() { self.verb() } else { "" }
    }

    fn is_constrained(self) -> bool {
        self != Self::Legacy
    }

    /// Whether the mode can impersonate this user.
    pub(super) fn supports(self, wanted: &User, caller: &Caller<'_>) -> bool {
        let has_only_name = wanted.uid.is_empty() && wanted.groups.is_empty() && wanted.extra.is_empty();
        let (node, account) = (node_name(&wanted.name), account(&wanted.name));
        let supports = match self {
            Self::AssociatedNode => has_only_name && node.is_some() && node == node_of_account(caller.user),
            Self::ArbitraryNode => has_only_name && node.is_some(),
            Self::ServiceAccount => has_only_name && account.is_some(),
            Self::UserInfo => node.is_none() && account.is_none(),
            Self::Legacy => true,
        };
        supports && (caller.is_constrained || !self.is_constrained())
    }

    /// Checks all permissions of the mode. Returns the user with the groups that the mode implies.
    ///
    /// # Errors
    /// The refusal of the first missing permission.
    pub(super) async fn impersonate(self, caller: &Caller<'_>, wanted: &User) -> Result<User> {
        let associated;
        let user = match self {
            Self::AssociatedNode => {
                associated = without_extra_values(caller.user);
                &associated
            }
            _ => caller.user,
        };
        let check = Check { mode: self, caller, user };
        check.request().await?;
        check.name(&wanted.name).await?;
        if !wanted.uid.is_empty() {
            let uid = Target { group: GROUP, resource: "uids", name: &wanted.uid, ..Target::default() };
            check.value(uid).await?;
        }
        check.groups(&wanted.groups).await?;
        check.extra(&wanted.extra).await?;
        let mut user = wanted.clone();
        if user.groups.is_empty() {
            user.groups = self.implied_groups(&wanted.name);
        }
        Ok(user)
    }

    /// Groups of a user without groups in the headers.
    fn implied_groups(self, name: &str) -> Vec<String> {
        match account(name) {
            Some((namespace, _)) => {
                vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")]
            }
            None if self.is_constrained() && node_name(name).is_some() => vec!["system:nodes".to_owned()],
            None => Vec::new(),
        }
    }
}

/// The caller for authorizers in the mode `associated-node`. As upstream, it has the names of the extra values only.
fn without_extra_values(caller: &User) -> User {
    let keys = caller.extra.keys().cloned().collect();
    User { extra: BTreeMap::from([(ASSOCIATED_KEYS.to_owned(), keys)]), ..caller.clone() }
}

// === impl Check ===

impl Check<'_> {
    /// Checks that the mode may be used for the request.
    async fn request(&self) -> Result<()> {
        let Some(mode) = self.mode.verb().strip_prefix("impersonate:") else { return Ok(()) };
        let info = self.caller.info;
        let verb = format!("impersonate-on:{mode}:{}", info.verb);
        let attributes = AccessAttributes { user: self.user, verb: &verb, info, cache: self.caller.cache };
        self.count(self.caller.authorizers.authorize(&attributes)).await
    }

    async fn name(&self, wanted: &str) -> Result<()> {
        let user = Target { group: self.group(), resource: "users", name: wanted, ..Target::default() };
        let node = node_name(wanted).filter(|_| self.mode.is_constrained());
        let target = match (account(wanted), node) {
            (Some((namespace, name)), _) => Target { resource: "serviceaccounts", namespace, name, ..user },
            // As upstream, one permission covers all nodes.
            (None, Some(_)) if self.mode == Mode::AssociatedNode => {
                Target { resource: "nodes", name: "*", ..user }
            }
            (None, Some(name)) => Target { resource: "nodes", name, ..user },
            (None, None) => user,
        };
        self.value(target).await
    }

    async fn groups(&self, groups: &[String]) -> Result<()> {
        let group = Target { group: self.group(), resource: "groups", ..Target::default() };
        if self.mode.is_constrained() {
            if let Some(name) = groups.iter().find(|name| matches!(name.as_str(), "" | "system:masters")) {
                let reason = format!("impersonating the group {name:?} is not allowed");
                return self.refuse(Target { name, ..group }, reason);
            }
            let is_many = groups.len() >= MANY;
            if is_many && self.value(Target { name: "*", ..group }).await.is_ok() {
                return Ok(());
            }
        }
        for name in groups {
            self.value(Target { name, ..group }).await?;
        }
        Ok(())
    }

    async fn extra(&self, extra: &BTreeMap<String, Vec<String>>) -> Result<()> {
        let target = Target { group: GROUP, resource: "userextras", ..Target::default() };
        if self.mode.is_constrained() {
            if let Some(key) = extra.keys().find(|key| !is_domain_prefixed(key)) {
                let reason =
                    format!("the extra key {key:?} is not a domain with a path, such as acme.io/foo");
                return self.refuse(target, reason);
            }
            if let Some((key, _)) = extra.iter().find(|(_, values)| values.iter().any(String::is_empty)) {
                return self.refuse(target, format!("the extra key {key:?} has an empty value"));
            }
            let is_many = extra.values().map(Vec::len).sum::<usize>() >= MANY;
            if is_many && self.value(Target { subresource: "*", name: "*", ..target }).await.is_ok() {
                return Ok(());
            }
        }
        for (key, values) in extra {
            for value in values {
                self.value(Target { subresource: key, name: value, ..target }).await?;
            }
        }
        Ok(())
    }

    /// Group of users, groups, service accounts and nodes.
    fn group(&self) -> &'static str {
        if self.mode.is_constrained() { GROUP } else { "" }
    }

    /// Checks the permission to impersonate the target.
    async fn value(&self, target: Target<'_>) -> Result<()> {
        let (authorizers, cache) = (self.caller.authorizers, self.caller.cache);
        self.count(authorizers.authorize_also(cache, self.user, self.mode.verb(), target.into())).await
    }

    /// Counts the check of a permission.
    async fn count(&self, check: impl Future<Output = Result<()>>) -> Result<()> {
        let began = Instant::now();
        let checked = check.await;
        self.caller.counts.checks.add(self.mode.name(), checked.is_ok(), began.elapsed());
        checked
    }

    /// The error of a target that no permission allows.
    fn refuse(&self, target: Target<'_>, reason: String) -> Result<()> {
        let resource = Some(ResourceInfo::from(target));
        let info = RequestInfo { verb: "", path: String::new(), query: Query::default(), resource };
        let (user, cache) = (self.user, self.caller.cache);
        let attributes = AccessAttributes { user, verb: self.mode.verb(), info: &info, cache };
        Decision { verdict: Verdict::Deny, reason: reason.into() }.permit(&attributes)
    }
}

/// Whether a key is a domain with a path after it. Source: `IsDomainPrefixedPath`.
fn is_domain_prefixed(key: &str) -> bool {
    key.split_once('/').is_some_and(|(domain, path)| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&byte);
        dns1123_subdomain(domain).is_empty() && !path.is_empty() && path.bytes().all(is_allowed)
    })
}

impl From<Target<'_>> for ResourceInfo {
    fn from(target: Target<'_>) -> Self {
        Self {
            group: target.group.to_owned(),
            version: "v1".to_owned(),
            namespace: target.namespace.to_owned(),
            resource: target.resource.to_owned(),
            subresource: target.subresource.to_owned(),
            name: target.name.to_owned(),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_form_names_a_service_account() {
        assert_eq!(account("system:serviceaccount:default:web"), Some(("default", "web")));
        assert_eq!(account("system:serviceaccount:default:web.v1"), Some(("default", "web.v1")));
        for other in ["a:b:c", "a:b:", "a.b:c", ":b", "a:", "a", "A:b", "a:b c"] {
            assert_eq!(account(&format!("system:serviceaccount:{other}")), None, "{other}");
        }
    }

    #[test]
    fn only_the_exact_form_names_a_node() {
        assert_eq!(node_name("system:node:n1.example"), Some("n1.example"));
        for other in ["system:node:", "system:node:N", "system:nodes:n", "system:node:a b", "n1"] {
            assert_eq!(node_name(other), None, "{other}");
        }
    }

    #[test]
    fn an_extra_key_has_a_domain() {
        assert!(is_domain_prefixed("acme.io/foo/bar"));
        for other in ["scopes", "/foo", "acme.io/", "ACME/foo", "acme.io/a b"] {
            assert!(!is_domain_prefixed(other), "{other}");
        }
    }
}
