//! Permissions of the control plane's controllers. Only calls within this process have them. A network client with the
//! same user name (by certificate or impersonation) has only the permissions of its roles.

use super::{AccessAttributes, Authorizer, Deciding, Decision};

/// Allows requests of the controllers in this process.
pub(super) struct Components;

impl Authorizer for Components {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        Decision::allow_if(allows(attributes), "the user is a controller of this process").ready()
    }
}

/// Whether a controller of this process may send a request. All kinds are allowed, because the garbage collector and
/// the namespace controller need them. Streams into pods are not allowed: no controller opens one.
fn allows(attributes: &AccessAttributes<'_>) -> bool {
    let Some(resource) = &attributes.info.resource else { return false };
    let subresource = resource.subresource.split('/').next().unwrap_or_default();
    attributes.user.is_component()
        && !matches!(subresource, "exec" | "attach" | "portforward" | "proxy" | "log")
}
