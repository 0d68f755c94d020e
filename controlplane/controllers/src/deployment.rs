//! Moves each deployment from one pod template to the next by sizing its replica sets.

mod condition;
pub(crate) mod plan;
mod revision;
mod rolling;
pub(crate) mod run;
mod status;
#[cfg(test)]
mod tests;
