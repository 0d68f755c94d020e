//! Protects claims that pods use: a claim is deleted only after its last use.

pub(crate) mod run;
