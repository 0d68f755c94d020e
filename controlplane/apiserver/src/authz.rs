//! Authorization: a chain of authorizers. The first one that allows the request decides; the default is deny.

mod component;
pub(crate) mod impersonation;
mod masters;
pub(crate) mod node;
pub(crate) mod rbac;

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::{Query, RequestInfo, ResourceInfo},
};

/// The attributes of a request for authorizers.
pub(crate) struct Question<'a> {
    pub(crate) user: &'a User,
    /// The verb; by default the verb of the request.
    pub(crate) verb: &'a str,
    pub(crate) info: &'a RequestInfo,
    pub(crate) cache: &'a Cache,
}

/// An authorizer: whether it allows the request. If not, the next one is asked.
type Authorizer = fn(&Question<'_>) -> bool;

const CHAIN: &[Authorizer] = &[masters::allows, node::allows, component::allows, rbac::allows];

/// Allows the request, or returns the error for the client.
pub(crate) fn authorize(question: &Question<'_>) -> Result<()> {
    if CHAIN.iter().any(|allows| allows(question)) {
        return Ok(());
    }
    Err(ApiError::forbidden(refusal(question)))
}

/// Whether a request opens a stream into a pod. It needs the verb `create` for every method.
pub(crate) fn enters_pod(info: &RequestInfo) -> bool {
    info.resource.as_ref().is_some_and(|resource| {
        resource.group.is_empty()
            && resource.resource == "pods"
            && matches!(resource.subresource.as_str(), "exec" | "attach" | "portforward")
    })
}

/// Whether the user has a permission besides that of the request.
pub(crate) fn authorize_also(cache: &Cache, user: &User, verb: &str, resource: ResourceInfo) -> Result<()> {
    let info =
        RequestInfo { verb: "", path: String::new(), query: Query::default(), resource: Some(resource) };
    authorize(&Question { user, verb, info: &info, cache })
}

fn refusal(question: &Question<'_>) -> String {
    let (user, verb, info) = (&question.user.name, question.verb, question.info);
    let Some(resource) = &info.resource else {
        return format!("forbidden: User \"{user}\" cannot {verb} path \"{}\"", info.path);
    };
    let mut what = resource.resource.clone();
    if !resource.subresource.is_empty() {
        what = format!("{what}/{}", resource.subresource);
    }
    let qualified = if resource.group.is_empty() {
        resource.resource.clone()
    } else {
        format!("{}.{}", resource.resource, resource.group)
    };
    let subject =
        if resource.name.is_empty() { qualified } else { format!("{qualified} \"{}\"", resource.name) };
    let scope = if resource.namespace.is_empty() || resource.resource == "namespaces" {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", resource.namespace)
    };
    format!(
        "{subject} is forbidden: User \"{user}\" cannot {verb} resource \"{what}\" in API group \"{}\" {scope}",
        resource.group
    )
}
