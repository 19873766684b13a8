//! Helpers of the whole-system tests.

pub mod built;
pub mod control;
pub mod guest;
pub mod hosts;
pub mod impaired_link;
pub mod kv;
pub mod needs;
pub mod node;
pub mod pager;
pub mod record;
pub mod run;
pub mod scene;
pub mod scrape;
pub mod signals;
pub mod thread;
pub mod waiting;
