//! The group `system:masters` has every permission.

use super::{Authorizer, Deciding, Decision, Question};

/// Allows every request of the group `system:masters`.
pub(super) struct Masters;

impl Authorizer for Masters {
    fn authorize<'a>(&'a self, question: &'a Question<'a>) -> Deciding<'a> {
        Decision::allow_if(allows(question), "the user is in the group system:masters").ready()
    }
}

fn allows(question: &Question<'_>) -> bool {
    question.user.is_in("system:masters")
}
