//! Permissions of the control plane's controllers. Only calls within this process get them. A network client with the
//! same user name (by certificate or impersonation) has only the permissions of its roles.

use super::Question;

/// The garbage collector and the namespace controller handle every kind. No controller opens streams into pods.
pub(super) fn allows(question: &Question<'_>) -> bool {
    let Some(resource) = &question.info.resource else { return false };
    let subresource = resource.subresource.split('/').next().unwrap_or_default();
    question.user.is_component()
        && !matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log")
}
