//! The deployment controller: scales replica sets to move pods from one template to the next.

mod condition;
pub(crate) mod plan;
mod revision;
mod rolling;
pub(crate) mod run;
mod status;
#[cfg(test)]
mod tests;
