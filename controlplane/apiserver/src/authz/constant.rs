//! The modes `AlwaysAllow` and `AlwaysDeny`.

use super::{Authorizer, Deciding, Decision, Question};

/// Allows every request. Anonymous requests are not accepted with it.
pub(super) struct AlwaysAllow;

/// Allows no request: the members of the chain after it still may.
pub(super) struct AlwaysDeny;

impl Authorizer for AlwaysAllow {
    fn authorize<'a>(&'a self, _: &'a Question<'a>) -> Deciding<'a> {
        Decision::allow_if(true, "").ready()
    }
}

impl Authorizer for AlwaysDeny {
    fn authorize<'a>(&'a self, _: &'a Question<'a>) -> Deciding<'a> {
        Decision::no_opinion("Everything is forbidden.").ready()
    }
}
