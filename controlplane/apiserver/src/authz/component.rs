//! The control plane's own controllers may do what they are for. They are known by their way here, through the process
//! itself: whoever comes over the network by their name, with a certificate or in another's name, has what roles say.

use super::Question;

/// The garbage collector and the namespace controller work on every kind; none of the controllers enters pods.
pub(super) fn allows(question: &Question<'_>) -> bool {
    let Some(resource) = &question.info.resource else { return false };
    let subresource = resource.subresource.split('/').next().unwrap_or_default();
    question.user.is_component()
        && !matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log")
}
