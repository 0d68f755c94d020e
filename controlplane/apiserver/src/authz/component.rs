//! Permissions of the control plane's controllers. Only calls within this process get them. A network client with the
//! same user name (by certificate or impersonation) has only the permissions of its roles.

use super::{Authorizer, Deciding, Decision, Question};

/// Allows requests of the controllers in this process.
pub(super) struct Components;

impl Authorizer for Components {
    fn authorize<'a>(&'a self, question: &'a Question<'a>) -> Deciding<'a> {
        Decision::allow_if(allows(question), "the user is a controller of this process").ready()
    }
}

/// The garbage collector and the namespace controller handle every kind. No controller opens streams into pods.
fn allows(question: &Question<'_>) -> bool {
    let Some(resource) = &question.info.resource else { return false };
    let subresource = resource.subresource.split('/').next().unwrap_or_default();
    question.user.is_component()
        && !matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log")
}
