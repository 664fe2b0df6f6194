/** Chooses the page from the path; each page is a chunk of its own, fetched when it is first opened. */

import { Component, lazy, Suspense, useEffect, useState, type ReactNode } from "react";

import { useIsSignInNeeded } from "./api/session.ts";
import { KeySheet, useShortcuts } from "./components/keyboard.tsx";
import { EmptyState, LoadingState } from "./components/states.tsx";
import { ToastRegion } from "./components/toast.tsx";
import { ConnectionBanner, TopBar } from "./components/TopBar.tsx";
import { RunsPage } from "./pages/runs/RunsPage.tsx";
import { href, Link, navigate, usePlace } from "./routing/router.tsx";
import { toggleTheme } from "./theme/theme.ts";

const RunPage = lazy(() => import("./pages/run/RunPage.tsx"));
const ComparePage = lazy(() => import("./pages/compare/ComparePage.tsx"));
const ExperimentsPage = lazy(() => import("./pages/experiments/ExperimentsPage.tsx"));
const ExperimentPage = lazy(() => import("./pages/experiments/ExperimentPage.tsx"));
const SubmitPage = lazy(() => import("./pages/submit/SubmitPage.tsx"));
const SignInPage = lazy(() => import("./pages/sign-in/SignInPage.tsx"));
const ClusterPage = lazy(() => import("./pages/cluster/ClusterPage.tsx"));

/** A part of the path as it was meant; one that is no encoding of anything is taken as it stands. */
function decodePart(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function pageFor(path: string): ReactNode {
  const [section, id, ...rest] = path.split("/").filter(Boolean).map(decodePart);
  if (rest.length > 0) return <UnknownPage />;
  if (section === "runs") return id === undefined ? <RunsPage /> : <RunPage key={id} id={id} />;
  if (section === "experiments") return id === undefined ? <ExperimentsPage /> : <ExperimentPage key={id} id={id} />;
  if (id !== undefined) return <UnknownPage />;
  if (section === "compare") return <ComparePage />;
  if (section === "submit") return <SubmitPage />;
  if (section === "cluster") return <ClusterPage />;
  return <UnknownPage />;
}

function UnknownPage() {
  return (
    <main className="page" id="main" tabIndex={-1}>
      <EmptyState title="There is no such page">
        <Link to={href("/runs")} className="btn">
          All runs
        </Link>
      </EmptyState>
    </main>
  );
}

export function App() {
  const { path } = usePlace();
  const [isHelpOpen, setIsHelpOpen] = useState(false);
  const isSignInNeeded = useIsSignInNeeded();
  useEffect(() => {
    if (path === "/") navigate(href("/runs"), { replace: true });
  }, [path]);
  useShortcuts({
    "?": () => setIsHelpOpen(true),
    n: () => navigate(href("/submit")),
    t: toggleTheme,
  });
  return (
    <>
      <a className="skip-link" href="#main">
        Skip to content
      </a>
      <TopBar onHelp={() => setIsHelpOpen(true)} />
      {!isSignInNeeded && <ConnectionBanner />}
      <PageBoundary key={path}>
        <Suspense
          fallback={
            <main className="page">
              <LoadingState what="the page" />
            </main>
          }
        >
          {isSignInNeeded ? <SignInPage /> : path === "/" ? null : pageFor(path)}
        </Suspense>
      </PageBoundary>
      <ToastRegion />
      <KeySheet isOpen={isHelpOpen} onClose={() => setIsHelpOpen(false)} />
    </>
  );
}

/** A page that throws (or whose chunk is gone after an upgrade) says so instead of leaving a blank window. */
class PageBoundary extends Component<{ children: ReactNode }, { message: string | null }> {
  override state: { message: string | null } = { message: null };

  static getDerivedStateFromError(error: unknown): { message: string } {
    return { message: error instanceof Error ? error.message : String(error) };
  }

  override render(): ReactNode {
    if (this.state.message === null) return this.props.children;
    return (
      <main className="page">
        <EmptyState title="This page could not be shown">
          <pre>{this.state.message}</pre>
          <button type="button" className="btn" onClick={() => window.location.reload()}>
            Reload
          </button>
        </EmptyState>
      </main>
    );
  }
}

