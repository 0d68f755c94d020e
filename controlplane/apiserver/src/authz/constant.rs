//! The modes `AlwaysAllow` and `AlwaysDeny`.

use super::{AccessAttributes, Authorizer, Deciding, Decision, RulesScope, UserRules, rbac::rule::Rule};

/// Allows every request. The server refuses anonymous requests in this mode.
pub(super) struct AlwaysAllow;

/// The authorizer `AlwaysDeny`: it has no opinion on any request. Later authorizers of the chain may allow the request.
pub(super) struct AlwaysDeny;

impl Authorizer for AlwaysAllow {
    fn authorize<'a>(&'a self, _: &'a AccessAttributes<'a>) -> Deciding<'a> {
        Decision::allow_if(true, "").ready()
    }

    fn add_rules(&self, _: &RulesScope<'_>, found: &mut UserRules) {
        found.rules.extend(Rule::all());
    }
}

impl Authorizer for AlwaysDeny {
    fn authorize<'a>(&'a self, _: &'a AccessAttributes<'a>) -> Deciding<'a> {
        Decision::no_opinion("Everything is forbidden.").ready()
    }
}
