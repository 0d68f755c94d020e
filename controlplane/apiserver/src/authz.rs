//! May they? A chain that denies by default: the first member that allows decides.

mod baseline;
mod component;
mod masters;
mod node;

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    request::RequestInfo,
};

/// What is asked of an authorizer.
pub(crate) struct Question<'a> {
    pub(crate) user: &'a User,
    pub(crate) info: &'a RequestInfo,
    pub(crate) cache: &'a Cache,
}

/// One member of the chain: whether it allows. Silence is no refusal.
type Authorizer = fn(&Question<'_>) -> bool;

const CHAIN: &[Authorizer] = &[masters::allows, node::allows, component::allows, baseline::allows];

/// Passes, or fails with the sentence that clients print.
pub(crate) fn authorize(question: &Question<'_>) -> Result<()> {
    if CHAIN.iter().any(|allows| allows(question)) {
        return Ok(());
    }
    Err(ApiError::forbidden(refusal(question)))
}

fn refusal(question: &Question<'_>) -> String {
    let (user, info) = (&question.user.name, question.info);
    let Some(resource) = &info.resource else {
        return format!("forbidden: User \"{user}\" cannot {} path \"{}\"", info.verb, info.path);
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
        "{subject} is forbidden: User \"{user}\" cannot {} resource \"{what}\" in API group \"{}\" {scope}",
        info.verb, resource.group
    )
}
