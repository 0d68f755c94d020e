//! The cron job controller: creates jobs at the times of a schedule.

pub(crate) mod plan;
pub(crate) mod run;
mod times;
