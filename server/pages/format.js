// Human-readable numbers. An en dash stands for an unknown one.

export const NONE = "\u2013";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

export const percent = (part) => (part === null || part === undefined ? NONE : `${Math.round(part * 100)}\u202f%`);

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0005) return "0\u202fs";
  if (value < 0.9995) return `${Math.round(value * 1000)}\u202fms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)}\u202fs`;
  return `${whole.format(value)}\u202fs`;
}

/** Returns a time that has passed, in whole seconds or minutes. */
export function ago(value) {
  if (value < 1) return "just now";
  return value < 120 ? `${Math.round(value)}\u202fs ago` : `${Math.round(value / 60)}\u202fmin ago`;
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  if (value > 0 && value < 9.95) return value.toFixed(1);
  return whole.format(value);
}

const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Returns a time of the day, with the day unless that is today. */
export function clock(epochS) {
  const date = new Date(epochS * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  return (isToday ? "" : `${dayFormat.format(date)} `) + clockFormat.format(date);
}

/** Returns the hour and the minute. */
export const minute = (epochS) => clockFormat.format(new Date(epochS * 1000)).slice(0, 5);

export const plural = (number, one, many = `${one}s`) => `${whole.format(number)} ${number === 1 ? one : many}`;
