//! The group `system:masters` has every permission.

use super::{AccessAttributes, Authorizer, Deciding, Decision};

/// Allows every request of the group `system:masters`.
pub(super) struct Masters;

impl Authorizer for Masters {
    fn authorize<'a>(&'a self, attributes: &'a AccessAttributes<'a>) -> Deciding<'a> {
        // As upstream, the decision has no reason.
        Decision::allow_if(allows(attributes), "").ready()
    }
}

fn allows(attributes: &AccessAttributes<'_>) -> bool {
    attributes.user.is_in("system:masters")
}
