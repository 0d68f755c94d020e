//! The variable `authorizer`: builds authorization checks and passes them to the host.

use std::fmt;
use std::sync::Arc;

use crate::types::{Type, opaque};

/// Type of the variable `authorizer`.
pub const AUTHORIZER: Type = opaque("kubernetes.authorization.Authorizer");
pub(crate) const PATH_CHECK: Type = opaque("kubernetes.authorization.PathCheck");
pub(crate) const GROUP_CHECK: Type = opaque("kubernetes.authorization.GroupCheck");
/// Type of a check of a resource, such as `authorizer.requestResource`.
pub(crate) const RESOURCE_CHECK: Type = opaque("kubernetes.authorization.ResourceCheck");
pub(crate) const DECISION: Type = opaque("kubernetes.authorization.Decision");

/// Decides about permissions for an expression.
pub trait Authorize: Send + Sync {
    /// Whether the request is allowed. This call must not block for long.
    fn authorize(&self, attributes: &CheckAttributes) -> AccessDecision;
}

/// The attributes of an authorization check. Without a service account, the user of the request is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CheckAttributes {
    /// Namespace and name of the service account whose permissions are checked.
    pub service_account: Option<(String, String)>,
    /// A path that is not the path of a resource.
    pub path: Option<String>,
    /// API group.
    pub group: String,
    /// API version; `*` for any.
    pub version: String,
    /// Resource.
    pub resource: String,
    /// Subresource.
    pub subresource: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Field selector, as text.
    pub field_selector: String,
    /// Label selector, as text.
    pub label_selector: String,
    /// Verb.
    pub verb: String,
}

impl CheckAttributes {
    /// Bytes of all texts.
    pub(crate) fn size(&self) -> u64 {
        let account =
            self.service_account.as_ref().map_or(0, |(namespace, name)| namespace.len() + name.len());
        let path = self.path.as_ref().map_or(0, String::len);
        let texts = [
            &self.group,
            &self.version,
            &self.resource,
            &self.subresource,
            &self.namespace,
            &self.name,
            &self.field_selector,
            &self.label_selector,
            &self.verb,
        ];
        let size = texts.into_iter().map(String::len).sum::<usize>() + account + path;
        u64::try_from(size).unwrap_or(u64::MAX)
    }
}

/// The result of an authorization check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessDecision {
    /// Whether the request is allowed.
    pub allowed: bool,
    /// Reason of the decision.
    pub reason: String,
    /// The error that prevented a decision.
    pub error: Option<String>,
}

/// A partial authorization check: the value of `authorizer` and of the results of its functions.
#[derive(Clone)]
pub struct Access<'a> {
    pub(crate) host: &'a dyn Authorize,
    pub(crate) attributes: Arc<CheckAttributes>,
    pub(crate) stage: Stage,
    /// The attributes of `authorizer.requestResource`.
    pub(crate) request: Arc<CheckAttributes>,
}

/// The type of the value, which determines the functions that can be called next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Authorizer,
    Path,
    Group,
    Resource,
}

impl<'a> Access<'a> {
    /// The variable `authorizer`. `request` is the resource of the request. Its API version is replaced by `*`.
    pub fn new(host: &'a dyn Authorize, request: CheckAttributes) -> Access<'a> {
        let request = CheckAttributes { version: "*".to_owned(), ..request };
        Access { host, attributes: Arc::default(), stage: Stage::Authorizer, request: Arc::new(request) }
    }

    pub(crate) fn of_request(&self) -> Access<'a> {
        Access { attributes: self.request.clone(), stage: Stage::Resource, ..self.clone() }
    }

    pub(crate) fn with(&self, stage: Stage, change: impl FnOnce(&mut CheckAttributes)) -> Access<'a> {
        let mut next = self.clone();
        next.stage = stage;
        change(Arc::make_mut(&mut next.attributes));
        next
    }

    pub(crate) fn type_name(&self) -> &'static str {
        let kind = match self.stage {
            Stage::Authorizer => AUTHORIZER,
            Stage::Path => PATH_CHECK,
            Stage::Group => GROUP_CHECK,
            Stage::Resource => RESOURCE_CHECK,
        };
        match kind {
            Type::Opaque(name) => name,
            _ => "dyn",
        }
    }
}

impl fmt::Debug for Access<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("attributes", &self.attributes).field("stage", &self.stage).finish()
    }
}
